"""Requests for a checkpoint now: rank 0 is asked, and all ranks agree on the step after which they save.

The flag of rank 0 is part of each step's all-reduce. Islands exchange no results of steps: they agree when a round
ends, which is also the only time at which they can save. The group of checkpoints is not used for that: a thread that
saves uses it at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.protocol.run_config import NativeRun
from meshwright_worker.distributed.mesh import ISLAND, Mesh
from meshwright_worker.local_sgd.outer_optimizer import RoundSchedule
from meshwright_worker.local_sgd.parameter_averaging import any_island
from meshwright_worker.rank.task import RankEvents
from meshwright_worker.trainer.trainer import StepResult


class CheckpointRequests:
    """The requests of one mesh generation."""

    def __init__(self, run: NativeRun, mesh: Mesh, events: RankEvents) -> None:
        training = run.training
        self._rounds = RoundSchedule(training.outer.every_steps, training.steps) if training.outer else None
        self._mesh, self._events = mesh, events
        self._requested = self._all_islands = False

    def record(self, results: Iterable[StepResult]) -> None:
        """Record results of steps."""
        self._requested = self._requested or any(result.save for result in results)

    def end_step(self, number: int) -> None:
        """Record the end of step `number`. With islands, collective at the end of a round."""
        if self._rounds is not None and self._rounds.ends_round(number):
            self._requested = any_island(self._requested, self._mesh.device, self._mesh.group(ISLAND))
            self._all_islands = self._requested

    @property
    def due(self) -> bool:
        """Whether all ranks save now, because of a request."""
        return self._requested and (self._rounds is None or self._all_islands)

    def answer(self, step: int) -> None:
        """All ranks save after `step`, for whatever reason: this is the requested checkpoint, if there is a request."""
        if self._requested and self._mesh.rank == 0:
            self._events.checkpoint_begun(step)
        self._requested = self._all_islands = False
