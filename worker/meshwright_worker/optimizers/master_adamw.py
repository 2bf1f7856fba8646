"""AdamW (arXiv 1711.05101) on fp32 master weights, with gradients that may have fewer bits.

Gradients are converted for a few shards at a time: all of them in fp32 would take more than the gradients themselves.
They are scaled and clipped after the conversion, so that this rounds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim.adamw import adamw

from meshwright.api.training import OptimizerSpec
from meshwright_worker.optimizers.optimizer import EPSILON, MOMENTS, applies_weight_decay, clear_gradients
from meshwright_worker.parallel.data.gradient_buckets import split_into_buckets
from meshwright_worker.parallel.shards import ParameterShard

_ELEMENTS = 1 << 24
"""Elements that are converted and updated at a time."""


class MasterAdamW:
    """The optimizer of one rank with sharded master weights; the shards are the masters."""

    factor = 1.0
    """By which the next step multiplies gradients."""

    def __init__(self, shards: Sequence[ParameterShard], spec: OptimizerSpec) -> None:
        self._shards = shards
        self._spec = spec
        self._moments = [{moment: torch.zeros_like(shard.local) for moment in MOMENTS} for shard in shards]
        self._steps = [torch.zeros((), dtype=torch.float32, device=shard.local.device) for shard in shards]
        self._numbers = {id(shard): number for number, shard in enumerate(shards)}
        self._buckets = split_into_buckets(
            range(len(shards)),
            lambda number: shards[number].local.numel(),
            _ELEMENTS,
            lambda number: applies_weight_decay(shards[number]),
        )

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor], rate: float) -> None:
        """See `Optimizer.step`."""
        for bucket in self._buckets:
            self._update(bucket, [gradients[number] for number in bucket], rate)
        self.factor = 1.0
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """See `Optimizer.clear_gradients`."""
        clear_gradients(self._shards)

    def moments(self, shard: ParameterShard) -> dict[str, torch.Tensor]:
        """See `Optimizer.moments`."""
        return self._moments[self._numbers[id(shard)]]

    def set_step_count(self, steps: int) -> None:
        """See `Optimizer.set_step_count`."""
        for count in self._steps:
            count.fill_(steps)

    def _update(self, bucket: Sequence[int], gradients: Sequence[torch.Tensor], rate: float) -> None:
        masters, spec = [self._shards[number].local for number in bucket], self._spec
        converted = [gradient.to(master.dtype) for gradient, master in zip(gradients, masters, strict=True)]
        if self.factor != 1.0:
            torch._foreach_mul_(converted, self.factor)
        first, second = ([self._moments[number][moment] for number in bucket] for moment in MOMENTS)
        adamw(
            masters,
            converted,
            first,
            second,
            max_exp_avg_sqs=[],
            state_steps=[self._steps[number] for number in bucket],
            fused=True,
            amsgrad=False,
            beta1=spec.beta1,
            beta2=spec.beta2,
            lr=rate,
            weight_decay=spec.weight_decay if applies_weight_decay(self._shards[bucket[0]]) else 0.0,
            eps=EPSILON,
            maximize=False,
        )
