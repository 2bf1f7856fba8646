"""The interface of methods that synchronize islands, for the training step and for checkpoints.

Checkpoints are taken after islands have synchronized, so parameters are equal on all islands and have their usual
names. Each island has its own optimizer state. That of island 0 has the usual names, so that a run without islands can
resume from it. The state of other islands, and of the outer optimizer, have separate names.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Protocol

import torch

from meshwright_worker.checkpoint.state_dict import MODEL, OPTIMIZER, as_distributed
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


def local_sgd_tensors(
    shards: Sequence[ParameterShard],
    outer: OuterOptimizer,
    island: int,
    buffers: Mapping[str, torch.Tensor] | None = None,
    known: Container[str] | None = None,
) -> dict[str, torch.Tensor]:
    """Return every tensor of this rank to save or load, by name.

    Args:
        shards: what this rank updates.
        outer: of the run.
        island: this rank's.
        buffers: learned buffers, which the end of a round makes equal on all islands.
        known: names in the checkpoint to load. An island that is not in it starts with the state of island 0, and
            missing outer state is not changed. Neither are missing buffers: version 0.1 saved none of islands.
    """
    tensors = {f"{MODEL}.{shard.name}": as_distributed(shard, shard.local) for shard in shards}
    for name, buffer in (buffers or {}).items():
        if known is None or f"{MODEL}.{name}" in known:
            tensors[f"{MODEL}.{name}"] = buffer
    checkpointed_optimizer = outer.checkpointed_optimizer()
    if checkpointed_optimizer is not None:
        optimizer_shards, optimizer = checkpointed_optimizer
        for shard in optimizer_shards:
            for moment, local in optimizer.moments(shard).items():
                default_name = f"{OPTIMIZER}.{shard.name}.{moment}"
                name = default_name if island == 0 else f"island-{island}.{default_name}"
                tensors[name if known is None or name in known else default_name] = as_distributed(shard, local)
    shards_by_name = {shard.name: shard for shard in shards}
    for (parameter, kind), local in outer.tensors().items():
        name = f"outer.{parameter}.{kind}"
        if known is None or name in known:
            tensors[name] = as_distributed(shards_by_name[parameter], local)
    return tensors
