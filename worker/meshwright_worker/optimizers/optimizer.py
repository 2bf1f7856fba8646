"""The optimizer interface, AdamW (arXiv 1711.05101) on the local shards, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from meshwright.api.training import OptimizerSpec
from meshwright_worker.parallel.shards import ParameterShard

MOMENTS = ("exp_avg", "exp_avg_sq")
EPSILON = 1e-8


class Optimizer(Protocol):
    """Updates the shards of one rank. Its state has the shards' shapes, and is saved and resharded like them."""

    def step(self, gradients: Sequence[torch.Tensor], rate: float) -> None:
        """Update every shard with its gradient, and drop the gradients."""

    def forget(self) -> None:
        """Drop the gradients of a step."""

    def moments(self, shard: ParameterShard) -> dict[str, torch.Tensor]:
        """Return the state of a shard, by name, with the shape of its local part."""

    def set_step_count(self, steps: int) -> None:
        """Set the number of updates before the loaded moments, from which bias correction counts."""


def applies_weight_decay(shard: ParameterShard) -> bool:
    """Return whether weight decay applies: only to matrices."""
    return shard.parameter.ndim > 1


def forget(shards: Sequence[ParameterShard]) -> None:
    """Drop the shards' gradients."""
    for shard in shards:
        shard.local.grad = None
        shard.parameter.grad = None


def learning_rate(step: int, steps: int, spec: OptimizerSpec) -> float:
    """Return the rate of step `step`, 1 to `steps`: linear warm-up to the peak, then a cosine (SGDR, arXiv
    1608.03983).
    """
    if step < spec.warmup_steps:
        return spec.learning_rate * step / spec.warmup_steps
    progress = (step - spec.warmup_steps) / max(1, steps - spec.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return spec.min_learning_rate + (spec.learning_rate - spec.min_learning_rate) * cosine


class AdamW:
    """The optimizer of one rank: state only for its shards, decay only on matrices."""

    def __init__(self, shards: Sequence[ParameterShard], spec: OptimizerSpec) -> None:
        self._shards = shards
        matrices = [shard.local for shard in shards if applies_weight_decay(shard)]
        others = [shard.local for shard in shards if not applies_weight_decay(shard)]
        groups = [
            {"params": tensors, "weight_decay": decay}
            for tensors, decay in ((matrices, spec.weight_decay), (others, 0.0))
            if tensors
        ]
        self._optimizer = torch.optim.AdamW(
            groups, lr=spec.learning_rate, betas=(spec.beta1, spec.beta2), eps=EPSILON, fused=True
        )
        for shard in shards:
            self._optimizer.state[shard.local] = {
                "step": torch.zeros((), dtype=torch.float32, device=shard.local.device),
                **{moment: torch.zeros_like(shard.local) for moment in MOMENTS},
            }

    def step(self, gradients: Sequence[torch.Tensor], rate: float) -> None:
        """See `Optimizer.step`."""
        for shard, gradient in zip(self._shards, gradients, strict=True):
            shard.local.grad = gradient
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self.forget()

    def forget(self) -> None:
        """See `Optimizer.forget`."""
        forget(self._shards)

    def moments(self, shard: ParameterShard) -> dict[str, torch.Tensor]:
        """See `Optimizer.moments`."""
        state = self._optimizer.state[shard.local]
        return {moment: state[moment] for moment in MOMENTS}

    def set_step_count(self, steps: int) -> None:
        """See `Optimizer.set_step_count`."""
        for shard in self._shards:
            self._optimizer.state[shard.local]["step"].fill_(steps)
