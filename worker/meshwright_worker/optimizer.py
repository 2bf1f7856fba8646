"""AdamW (arXiv 1711.05101) on the local shards, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from meshwright.api.spec import OptimizerSpec
from meshwright_worker.parallel.shards import Shard

_MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(step: int, steps: int, spec: OptimizerSpec) -> float:
    """The rate of step `step`, 1 to `steps`: linear warm-up to the peak, then a cosine (SGDR, arXiv 1608.03983)."""
    if step < spec.warmup_steps:
        return spec.learning_rate * step / spec.warmup_steps
    progress = (step - spec.warmup_steps) / max(1, steps - spec.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return spec.min_learning_rate + (spec.learning_rate - spec.min_learning_rate) * cosine


class AdamW:
    """The optimizer of one rank: state for its shards alone, decay on matrices alone."""

    def __init__(self, shards: Sequence[Shard], spec: OptimizerSpec) -> None:
        self._shards = shards
        matrices = [shard.local for shard in shards if shard.parameter.ndim > 1]
        others = [shard.local for shard in shards if shard.parameter.ndim <= 1]
        groups = [
            {"params": tensors, "weight_decay": decay}
            for tensors, decay in ((matrices, spec.weight_decay), (others, 0.0))
            if tensors
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=spec.learning_rate, betas=(spec.beta1, spec.beta2), fused=True)
        for shard in shards:
            self._optimizer.state[shard.local] = {
                "step": torch.zeros((), dtype=torch.float32, device=shard.local.device),
                **{moment: torch.zeros_like(shard.local) for moment in _MOMENTS},
            }

    def step(self, gradients: Sequence[torch.Tensor], rate: float) -> None:
        """Update every shard with its gradient."""
        for shard, gradient in zip(self._shards, gradients, strict=True):
            shard.local.grad = gradient
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self.forget()

    def forget(self) -> None:
        """Drop the gradients of a step."""
        for shard in self._shards:
            shard.local.grad = None
            shard.parameter.grad = None

    def moments(self, shard: Shard) -> dict[str, torch.Tensor]:
        """The shard's moments by name, shaped like its local part."""
        state = self._optimizer.state[shard.local]
        return {moment: state[moment] for moment in _MOMENTS}

    def set_steps(self, steps: int) -> None:
        """Say how many steps were taken before the moments were loaded: what the bias correction counts from."""
        for shard in self._shards:
            self._optimizer.state[shard.local]["step"].fill_(steps)
