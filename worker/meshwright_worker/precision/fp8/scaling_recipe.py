"""The scales of one fp8 product, and the recorded maxima of its tensors.

Delayed scaling: a step's scales come from the largest values of previous steps (Transformer Engine's recipe). No
product then waits for a maximum of its own tensors. The maxima of a step are reduced once, at its end, over replicas
and tensor group. Every rank that has a layer therefore uses the same scales, however the batch was split. The history
is not in checkpoints: the first step after a start scales dynamically.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from meshwright.api.precision import Fp8Scaling, Fp8Spec, Fp8Update
from meshwright_worker.distributed.mesh import REPLICA, TENSOR, Mesh
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


class DelayedScaling:
    """The maxima of all products of this rank's stages in the last steps."""

    def __init__(self, stages: Iterable[DecoderStage], mesh: Mesh) -> None:
        products = [product for stage in stages for product in fp8_recipes(stage)]
        self._products = [product for product in products if product.spec.update is Fp8Update.DELAYED]
        self._mesh = mesh
        length = self._products[0].spec.history if self._products else 1
        self._steps: deque[torch.Tensor] = deque(maxlen=length)

    def discard_observed(self) -> None:
        """Drop the maxima since the last step: they come from computation that is not training."""
        for product in self._products:
            product.observed_amax = None

    def advance(self) -> None:
        """End a step. Collective if products use delayed scaling."""
        if not self._products:
            return
        zero = torch.zeros(3, device=self._mesh.device)
        observed_amax = torch.stack(
            [zero if product.observed_amax is None else product.observed_amax for product in self._products]
        )
        for dimension, ranks in ((TENSOR, self._mesh.layout.tensor), (REPLICA, self._mesh.layout.shard_ranks)):
            if ranks > 1:
                dist.all_reduce(observed_amax, op=dist.ReduceOp.MAX, group=self._mesh.group(dimension))
        # The maxima of a step whose gradients overflowed do not predict those of the next.
        self._steps.append(observed_amax.nan_to_num(0.0, 0.0, 0.0))
        scaling_amax = torch.stack(list(self._steps)).amax(dim=0)
        for product, amax in zip(self._products, scaling_amax, strict=True):
            product.observed_amax, product.scaling_amax = None, amax
