"""The optimizer interface, and what the optimizers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from meshwright_worker.parallel.shards import ParameterShard

MOMENTS = ("exp_avg", "exp_avg_sq")
EPSILON = 1e-8


class Optimizer(Protocol):
    """Updates the shards of one rank. Its state has the shards' shapes, and is saved and resharded like them."""

    def step(self, gradients: Sequence[torch.Tensor], rate: float) -> None:
        """Update every shard with its gradient, and drop the gradients."""

    def clear_gradients(self) -> None:
        """Drop the gradients of a step."""

    def moments(self, shard: ParameterShard) -> dict[str, torch.Tensor]:
        """Return the state of a shard, by name, with the shape of its local part."""

    def set_step_count(self, steps: int) -> None:
        """Set the number of updates before the loaded moments, from which bias correction counts."""


def applies_weight_decay(shard: ParameterShard) -> bool:
    """Return whether weight decay applies: only to matrices."""
    return shard.parameter.ndim > 1


def clear_gradients(shards: Sequence[ParameterShard]) -> None:
    """Drop the shards' gradients."""
    for shard in shards:
        shard.local.grad = None
        shard.parameter.grad = None
