"""What every way of bringing islands together offers to the step and to checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from meshwright_worker.optimizers.optimizer import Optimizer
from meshwright_worker.parallel.shards import ParameterShard


class OuterOptimizer(Protocol):
    """Keeps islands together. Each method is called by every rank of every island, the first two at every step."""

    weight: float
    """Of this island in an average over islands; they add up to 1."""

    def begin_step(self) -> None:
        """A step begins: parameters may be brought up to date."""

    def update(self, gradients: Sequence[torch.Tensor], rate: float) -> None:
        """Take the step with the island's gradients, in place of the optimizer."""

    def synchronize(self, *, stop: bool) -> bool:
        """A round is over: make the parameters of all islands equal.

        Args:
            stop: whether this island is asked to stop.

        Returns:
            Whether any island is.
        """

    def on_parameters_loaded(self, step: int) -> None:
        """Parameters were just initialized or loaded from the checkpoint of `step`."""

    def tensors(self) -> dict[tuple[str, str], torch.Tensor]:
        """What a checkpoint must hold besides parameters and the optimizer's state: by parameter and name."""

    def checkpointed_optimizer(self) -> tuple[Sequence[ParameterShard], Optimizer] | None:
        """The optimizer whose state a checkpoint holds for this island, and its shards; None if another has it."""

    def close(self) -> None:
        """Training is over: let go of threads."""


class RoundSchedule:
    """When islands meet.

    Args:
        every: steps of a round.
        steps: of the whole run; the last round may be shorter.
    """

    def __init__(self, every: int, steps: int) -> None:
        self._every = every
        self._steps = steps

    def ends_round(self, step: int) -> bool:
        """Whether a round is over after `step`."""
        return step % self._every == 0 or step == self._steps


def local_tensors(shards: Sequence[ParameterShard]) -> list[torch.Tensor]:
    """The parts of parameters that this rank updates."""
    return [shard.local for shard in shards]
