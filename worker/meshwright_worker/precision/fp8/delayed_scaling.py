"""Delayed scaling: a step's scales come from the largest values of previous steps (Transformer Engine's recipe).

No product then waits for a maximum of its own tensors. The maxima of a step are reduced once, at its end, over replicas
and tensor group. Every rank that has a layer therefore uses the same scales, however the batch was split. The history
is not in checkpoints: the first step after a start scales dynamically.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
import torch.distributed as dist

from meshwright.api.precision import Fp8Update
from meshwright_worker.distributed.mesh import REPLICA, TENSOR, Mesh
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.precision.fp8.scaling_recipe import fp8_recipes


class DelayedScaling:
    """The maxima of all products of this rank's stages in the last steps."""

    def __init__(self, stages: Iterable[DecoderStage], mesh: Mesh) -> None:
        products = [product for stage in stages for product in fp8_recipes(stage)]
        self._products = [product for product in products if product.spec.update is Fp8Update.DELAYED]
        self._mesh = mesh
        length = self._products[0].spec.history if self._products else 1
        self._steps: deque[torch.Tensor] = deque(maxlen=length)

    def forget(self) -> None:
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
