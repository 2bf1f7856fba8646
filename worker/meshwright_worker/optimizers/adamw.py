"""AdamW (arXiv 1711.05101) on the local shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.api.training import OptimizerSpec
from meshwright_worker.optimizers.optimizer import EPSILON, MOMENTS, applies_weight_decay, clear_gradients
from meshwright_worker.parallel.shards import ParameterShard


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
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """See `Optimizer.clear_gradients`."""
        clear_gradients(self._shards)

    def moments(self, shard: ParameterShard) -> dict[str, torch.Tensor]:
        """See `Optimizer.moments`."""
        state = self._optimizer.state[shard.local]
        return {moment: state[moment] for moment in MOMENTS}

    def set_step_count(self, steps: int) -> None:
        """See `Optimizer.set_step_count`."""
        for shard in self._shards:
            self._optimizer.state[shard.local]["step"].fill_(steps)
