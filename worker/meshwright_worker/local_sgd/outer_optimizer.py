"""The interface of methods that synchronize islands, for the training step and for checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from meshwright_worker.optimizers.optimizer import Optimizer
from meshwright_worker.parallel.shards import ParameterShard


class OuterOptimizer(Protocol):
    """Synchronizes islands. Every rank of every island calls each method, the first two at every step."""

    weight: float
    """Weight of this island in an average over islands; the weights sum to 1."""

    def begin_step(self) -> None:
        """Prepare a step: may update the parameters."""

    def update(self, gradients: Sequence[torch.Tensor], rate: float) -> None:
        """Apply the island's gradients, instead of the optimizer."""

    def synchronize(self, *, stop: bool) -> bool:
        """End a round: make the parameters of all islands equal.

        Args:
            stop: whether this island is asked to stop.

        Returns:
            Whether any island is.
        """

    def on_parameters_loaded(self, step: int) -> None:
        """Start after parameters were initialized, or loaded from the checkpoint of `step`."""

    def tensors(self) -> dict[tuple[str, str], torch.Tensor]:
        """Return the tensors to save in addition to parameters and the optimizer's state: by parameter and name."""

    def checkpointed_optimizer(self) -> tuple[Sequence[ParameterShard], Optimizer] | None:
        """Return the optimizer whose state a checkpoint contains for this island, and its shards; None if another rank
        has it.
        """

    def close(self) -> None:
        """Finish after the last step: stop threads."""


class RoundSchedule:
    """The steps at which rounds end.

    Args:
        every: steps of a round.
        steps: of the entire run; the last round may be shorter.
    """

    def __init__(self, every: int, steps: int) -> None:
        self._every = every
        self._steps = steps

    def ends_round(self, step: int) -> bool:
        """Return whether a round ends after `step`."""
        return step % self._every == 0 or step == self._steps


def local_tensors(shards: Sequence[ParameterShard]) -> list[torch.Tensor]:
    """Return the parts of parameters that this rank updates."""
    return [shard.local for shard in shards]
