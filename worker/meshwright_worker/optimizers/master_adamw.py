"""AdamW (arXiv 1711.05101) on fp32 master weights, with gradients that may have fewer bits.

Gradients are scaled and clipped as part of the update. Compiled, that is one kernel, which reads and writes each number
once. Otherwise gradients are converted for a few shards at a time, since all of them in fp32 would take more than the
gradients themselves, and scaled after the conversion, so that this rounds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch.optim.adamw import adamw

from meshwright.api.training import OptimizerSpec
from meshwright_worker.optimizers.adamw_rule import as_rows, compiled, factors, has_rows, updated
from meshwright_worker.optimizers.optimizer import EPSILON, MOMENTS, applies_weight_decay, clear_gradients
from meshwright_worker.parallel.data.gradient_buckets import split_into_buckets
from meshwright_worker.parallel.shards import ParameterShard

_ELEMENTS = 1 << 24
"""Elements that are converted and updated at a time."""
_WORTH = 1 << 16
"""Elements of the smallest shard that is worth a kernel of its own: smaller ones are updated many at a time."""
_TOGETHER = 8
"""Shards of one size whose kernels are launched in one call of compiled code. Such a call takes the host longer than
the GPU takes for a matrix of a small model: with a call for each, updates would wait for the host.
"""


class MasterAdamW:
    """The optimizer of one rank whose shards are the master weights.

    Args:
        shards: the shards to update.
        spec: the optimizer's settings.
        compiles: whether large shards are updated by a compiled kernel.
    """

    factor = 1.0
    """By which the next step multiplies gradients."""

    def __init__(self, shards: Sequence[ParameterShard], spec: OptimizerSpec, *, compiles: bool = False) -> None:
        self._shards = shards
        self._spec = spec
        self._count = 0
        """Updates so far."""
        self._moments = [{moment: torch.zeros_like(shard.local) for moment in MOMENTS} for shard in shards]
        self._steps = [torch.zeros((), dtype=torch.float32, device=shard.local.device) for shard in shards]
        self._numbers = {id(shard): number for number, shard in enumerate(shards)}
        self._update_rows = compiled(_update_rows) if compiles else _update_rows
        self._update_rows_if_finite = compiled(_update_rows_if_finite) if compiles else _update_rows_if_finite
        large = [
            number
            for number, shard in enumerate(shards)
            if compiles and has_rows(shard.local) and shard.local.numel() >= _WORTH and shard.local.is_contiguous()
        ]
        self._calls = launched_together(
            large, lambda number: (shards[number].local.numel(), applies_weight_decay(shards[number]))
        )
        small = sorted({*range(len(shards))} - {*large})
        self._buckets = split_into_buckets(
            small,
            lambda number: shards[number].local.numel(),
            _ELEMENTS,
            lambda number: applies_weight_decay(shards[number]),
        )

    def step(self, gradients: Sequence[torch.Tensor], rate: float) -> None:
        """See `Optimizer.step`."""
        self._update(gradients, rate, self.factor)
        self.factor = 1.0

    def step_if_finite(self, gradients: Sequence[torch.Tensor], rate: float, factor: torch.Tensor) -> None:
        """Update with gradients times `factor`, fp64 [] on their device, if that is finite; otherwise change nothing.

        The host needs not know the factor. If it was not finite, call `withdraw` before the next update.
        """
        # torch.compile looks at the value of an fp64 number on a CPU, and so compiles again for one that is not finite.
        self._update(gradients, rate, factor.to(self._shards[0].local.dtype))

    def withdraw(self) -> None:
        """Do not count the last update, which has changed nothing."""
        self._count -= 1

    @torch.no_grad()
    def _update(self, gradients: Sequence[torch.Tensor], rate: float, factor: float | torch.Tensor) -> None:
        self._count += 1
        self._update_large(gradients, rate, factor)
        for bucket in self._buckets:
            self._update_bucket(bucket, [gradients[number] for number in bucket], rate, factor)
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """See `Optimizer.clear_gradients`."""
        clear_gradients(self._shards)

    def moments(self, shard: ParameterShard) -> dict[str, torch.Tensor]:
        """See `Optimizer.moments`."""
        return self._moments[self._numbers[id(shard)]]

    def set_step_count(self, steps: int) -> None:
        """See `Optimizer.set_step_count`."""
        self._count = steps
        for count in self._steps:
            count.fill_(steps)

    def _decay(self, number: int) -> float:
        return self._spec.weight_decay if applies_weight_decay(self._shards[number]) else 0.0

    def _update_large(self, gradients: Sequence[torch.Tensor], rate: float, factor: float | torch.Tensor) -> None:
        betas, update = (self._spec.beta1, self._spec.beta2), self._update_rows
        if isinstance(factor, torch.Tensor):
            update = self._update_rows_if_finite
        else:
            factor = torch.tensor(factor, dtype=torch.float64)
        decays = [self._decay(numbers[0]) for numbers in self._calls]
        rules = {decay: factors(self._spec, self._count, rate, decay) for decay in {*decays}}
        for numbers, decay in zip(self._calls, decays, strict=True):
            stored = [
                [as_rows(tensor) for tensor in (self._shards[number].local, *self._moments[number].values())]
                for number in numbers
            ]
            rows = [as_rows(gradients[number].contiguous()) for number in numbers]
            update(stored, rows, factor, rules[decay], betas)

    def _update_bucket(
        self, bucket: Sequence[int], gradients: Sequence[torch.Tensor], rate: float, factor: float | torch.Tensor
    ) -> None:
        masters, spec = [self._shards[number].local for number in bucket], self._spec
        converted = [gradient.to(master.dtype) for gradient, master in zip(gradients, masters, strict=True)]
        not_finite = None
        if isinstance(factor, torch.Tensor):
            not_finite = factor.isfinite().logical_not().float()
            torch._foreach_mul_(converted, factor)
        elif factor != 1.0:
            torch._foreach_mul_(converted, factor)
        first, second = ([self._moments[number][moment] for number in bucket] for moment in MOMENTS)
        adamw(
            masters,
            converted,
            first,
            second,
            max_exp_avg_sqs=[],
            state_steps=[self._steps[number] for number in bucket],
            fused=True,
            found_inf=not_finite,
            amsgrad=False,
            beta1=spec.beta1,
            beta2=spec.beta2,
            lr=rate,
            weight_decay=self._decay(bucket[0]),
            eps=EPSILON,
            maximize=False,
        )


def launched_together(numbers: Sequence[int], kind: Callable[[int], Hashable]) -> list[list[int]]:
    """Return shards in groups of `_TOGETHER` of one kind, and the rest one by one: there are two graphs to compile."""
    of_kind: dict[Hashable, list[int]] = {}
    for number in numbers:
        of_kind.setdefault(kind(number), []).append(number)
    groups = []
    for same in of_kind.values():
        whole = len(same) - len(same) % _TOGETHER
        groups += [same[first : first + _TOGETHER] for first in range(0, whole, _TOGETHER)]
        groups += [[number] for number in same[whole:]]
    return groups


def _update_rows(
    stored: list[list[torch.Tensor]],
    gradients: list[torch.Tensor],
    factor: torch.Tensor,
    rule: list[torch.Tensor],
    betas: tuple[float, float],
) -> None:
    """Update master weights and their moments in place, all [rows, columns], with gradients times `factor`, fp64 []."""
    for state, gradient in zip(stored, gradients, strict=True):
        scaled = gradient.to(state[0].dtype) * factor
        for tensor, new in zip(state, updated(state, scaled, rule, betas), strict=True):
            tensor.copy_(new)


def _update_rows_if_finite(
    stored: list[list[torch.Tensor]],
    gradients: list[torch.Tensor],
    factor: torch.Tensor,
    rule: list[torch.Tensor],
    betas: tuple[float, float],
) -> None:
    """Do as `_update_rows` if `factor`, [] on the device, is finite; otherwise leave the numbers as they are."""
    is_finite = factor.isfinite()
    for state, gradient in zip(stored, gradients, strict=True):
        scaled = gradient.to(state[0].dtype) * factor
        for tensor, new in zip(state, updated(state, scaled, rule, betas), strict=True):
            tensor.copy_(torch.where(is_finite, new, tensor))
