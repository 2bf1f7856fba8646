"""Low-rank adapters for a model's matrices (LoRA, arXiv 2106.09685).

A matrix W keeps its weights; the product of two narrow matrices is trained: W x + (alpha / rank) B A x. B starts at 0,
so training starts from the original model.

Over a tensor group the adapter is split like its matrix. If the matrix is split by rows (its outputs), B is split by
rows and A is replicated. If it is split by columns (its inputs), A is split by columns and B is replicated. The
replicated matrix sees a part of the outputs or inputs on each rank, so its gradient is a partial sum.
"""

from __future__ import annotations

import torch
from torch import nn

from meshwright.api.lora import LoraSpec
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.layers import Linear
from meshwright_worker.models.split_backward import linear

DOWN, UP = "adapter_down", "adapter_up"
"""The last part of the names of A, [rank, inputs], and B, [outputs, rank]."""


class AdaptedLinear(Linear):
    """A frozen matrix with an adapter, in its format and on its device."""

    def __init__(self, whole: Linear, spec: LoraSpec) -> None:
        # nn.Linear would allocate and fill the full matrix, before anything is split.
        with torch.device("meta"):
            super().__init__(whole.in_features, whole.out_features, bias=whole.bias is not None)
        self.weight, self.bias = whole.weight, whole.bias
        self.scale = spec.alpha / spec.rank
        self.adapter_down = nn.Parameter(whole.weight.new_empty(spec.rank, whole.in_features))
        self.adapter_up = nn.Parameter(whole.weight.new_empty(whole.out_features, spec.rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs]."""
        added = linear(linear(x, self.adapter_down), self.adapter_up)
        return super().forward(x) + self.scale * added


def apply_lora(stage: DecoderStage, spec: LoraSpec) -> None:
    """Add adapters to the matrices that `spec` names, and freeze everything else. In place, on the meta device.

    Raises:
        ValueError: a layer has none of the matrices.
    """
    target_names = {target.value.lower() for target in spec.targets}
    for index, block in stage.layers.items():
        adapted_count = 0
        for path in ("attention", "feed_forward"):
            module = block.get_submodule(path)
            for name, child in list(module.named_children()):
                if name in target_names and isinstance(child, Linear):
                    setattr(module, name, AdaptedLinear(child, spec))
                    adapted_count += 1
        if not adapted_count:
            raise ValueError(f"`training.lora.targets`: layer {index} has none of {', '.join(sorted(target_names))}")
    for name, parameter in stage.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def is_adapter(name: str) -> bool:
    """Return whether a parameter's name is that of an adapter's matrix."""
    return name.endswith((DOWN, UP))


def merge_adapter(weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, spec: LoraSpec) -> torch.Tensor:
    """Merge matrix and adapter into one matrix with the same result, in the format of `weight`."""
    return (weight.double() + spec.alpha / spec.rank * (up.double() @ down.double())).to(weight.dtype)
