"""The scales of one fp8 product, and the recorded maxima of its tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from meshwright.api.precision import Fp8Scaling, Fp8Spec, Fp8Update
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.layers import Linear
from meshwright_worker.models.moe import Experts

INPUT, WEIGHT, GRADIENT = range(3)


class Fp8Recipe:
    """The scales of a product, or of several products that are split in the same way.

    Args:
        spec: the scaling method.
        group: the ranks that the weight is split over; None if it is not split.
        inputs: whether the weight's inputs are split; otherwise, in a group, its outputs are.
        tokens: the ranks that each have a part of every sequence; None if sequences are not split.
    """

    def __init__(
        self,
        spec: Fp8Spec,
        group: dist.ProcessGroup | None,
        *,
        inputs: bool,
        tokens: dist.ProcessGroup | None = None,
    ) -> None:
        self.spec = spec
        self.rowwise = spec.scaling is Fp8Scaling.ROWWISE
        self.observed_amax: torch.Tensor | None = None
        """Delayed scaling: the largest input, weight and gradient of the current step so far, fp32 [3]."""
        self.scaling_amax: torch.Tensor | None = None
        """Delayed scaling: the maxima of the last steps, fp32 [3]; None in the first step."""
        self._group, self._tokens = group, tokens
        self._split = (group is not None and inputs, group is not None and not inputs)

    def compile(self) -> None:
        """Prepare for torch.compile."""

    def _fixed_amax(self, role: int, amax: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor | None:
        """Return the maximum to scale by, [], if it does not come from the current tensor (static or delayed
        scaling).
        """
        if self.spec.update is Fp8Update.STATIC:
            static_amax = (self.spec.input_amax, self.spec.weight_amax, self.spec.gradient_amax)[role]
            # Filled on the device: copying a number from the host would block the host.
            return torch.full((), static_amax, device=device)
        if self.spec.update is Fp8Update.DYNAMIC:
            return None
        if self.observed_amax is None:
            self.observed_amax = torch.zeros(3, device=device)
        self.observed_amax[role] = torch.maximum(self.observed_amax[role], amax())
        return None if self.scaling_amax is None else self.scaling_amax[role]

    def _max_over_group(self, amax: torch.Tensor, split: bool) -> torch.Tensor:
        """Take maxima over the group in place, if it splits their tensors."""
        if split:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self._group)
        return amax

    def _max_over_tokens(self, amax: torch.Tensor) -> torch.Tensor:
        """Take maxima, in place, over the ranks that have other tokens of the same sequences."""
        if self._tokens is not None:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self._tokens)
        return amax


def fp8_recipes(stage: DecoderStage) -> list[Fp8Recipe]:
    """Return the recipes of every fp8 product of a stage, in the order of its layers."""
    found: list[object] = []
    for module in stage.layers.modules():
        if isinstance(module, Linear):
            found.append(module.product)
        elif isinstance(module, Experts):
            found += module.products.values()
    return [recipe for recipe in found if isinstance(recipe, Fp8Recipe)]
