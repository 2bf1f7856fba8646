"""AdamW (arXiv 1711.05101) without fp32 copies: parameters and moments are bf16, rounded stochastically.

Memory per parameter: 2 bytes of it, 2 of its gradient, 4 of its moments, against 16 with fp32 parameters. The update
is computed in fp32, a few rows at a time. The noise of a rounding is a function of the seed, the parameter's name, the
step and the element's place in the whole parameter, so every layout rounds equal updates alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from meshwright.api.training import OptimizerSpec
from meshwright_worker.counters import key
from meshwright_worker.optimizer import EPSILON, MOMENTS, decays, forget
from meshwright_worker.optimizers.rounding import places, round_to_bf16
from meshwright_worker.parallel.shards import Shard

_ELEMENTS = 1 << 22
"""Of one piece of the update."""


class RoundedAdamW:
    """The optimizer of one rank where there are no master weights."""

    def __init__(self, shards: Sequence[Shard], spec: OptimizerSpec, seed: int) -> None:
        self._shards = shards
        self._spec = spec
        self._seed = seed
        self._steps = 0
        self._moments = {
            id(shard): {moment: torch.zeros_like(shard.local) for moment in MOMENTS} for shard in self._shards
        }

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor], rate: float) -> None:
        """See `Optimizer.step`."""
        self._steps += 1
        for shard, gradient in zip(self._shards, gradients, strict=True):
            self._update(shard, gradient, rate)
        self.forget()

    def forget(self) -> None:
        """See `Optimizer.forget`."""
        forget(self._shards)

    def moments(self, shard: Shard) -> dict[str, torch.Tensor]:
        """See `Optimizer.moments`."""
        return self._moments[id(shard)]

    def set_steps(self, steps: int) -> None:
        """See `Optimizer.set_steps`."""
        self._steps = steps

    def _update(self, shard: Shard, gradient: torch.Tensor, rate: float) -> None:
        local, box, shape = shard.local, shard.box, shard.shape
        if not local.numel():
            return
        salts = [key(self._seed, "rounding", shard.name, self._steps, what) for what in ("parameter", *MOMENTS)]
        stored = [local, *self._moments[id(shard)].values()]
        decay = self._spec.weight_decay if decays(shard) else 0.0
        rows = max(1, _ELEMENTS // (local.numel() // local.shape[0]))
        for first in range(0, local.shape[0], rows):
            part = slice(first, min(first + rows, local.shape[0]))
            start = box[0].start
            where = places((slice(start + part.start, start + part.stop), *box[1:]), shape, local.device)
            updated = self._adamw([tensor[part].float() for tensor in stored], gradient[part].float(), rate, decay)
            for tensor, new, salt in zip(stored, updated, salts, strict=True):
                tensor[part] = round_to_bf16(new, where, salt)

    def _adamw(
        self, state: list[torch.Tensor], gradient: torch.Tensor, rate: float, decay: float
    ) -> list[torch.Tensor]:
        parameter, first, second = state
        beta1, beta2 = self._spec.beta1, self._spec.beta2
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        size = rate / (1 - beta1**self._steps)
        divisor = second.sqrt().div_(math.sqrt(1 - beta2**self._steps)).add_(EPSILON)
        parameter.mul_(1 - rate * decay).addcdiv_(first, divisor, value=-size)
        return [parameter, first, second]
