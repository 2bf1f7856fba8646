"""Which tiers get a checkpoint after a step: rank 0 decides by its clock or an evaluation, or is asked, and all agree.

The number of rank 0 (see `checkpoint.schedule`) is part of each step's all-reduce. Islands exchange no results of
steps: they agree when a round ends, which is also the only time at which they can save. The group of checkpoints is not
used for that: a thread that saves uses it at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from meshwright.protocol.run_config import NativeRun
from meshwright.schedules.registry import kind_of
from meshwright_worker.checkpoint.schedule import BUSY, REQUEST, due_after, tier_bit
from meshwright_worker.checkpoint.store import Tier
from meshwright_worker.distributed.collectives import all_reduce_sum
from meshwright_worker.distributed.mesh import ISLAND, Mesh
from meshwright_worker.local_sgd.outer_optimizer import RoundSchedule
from meshwright_worker.local_sgd.parameter_averaging import any_island
from meshwright_worker.rank.task import RankEvents
from meshwright_worker.trainer.trainer import StepResult


class CheckpointRequests:
    """What is to be saved in one mesh generation."""

    def __init__(self, run: NativeRun, mesh: Mesh, events: RankEvents, tiers: Sequence[Tier] = ()) -> None:
        training = run.training
        self.drains = run.pipeline > 1 and kind_of(run.parallelism.order).asynchronous
        """Whether a save drains the pipeline, which changes how stale gradients are. Then saves after a number of steps
        are never postponed: a resumed run would compute something else."""
        self._rounds = RoundSchedule(training.outer.every_steps, training.steps) if training.outer else None
        self._mesh, self._events, self._tiers = mesh, events, tiers
        self._asked = 0
        """What rank 0 has asked for since the last save."""
        self._busy = self._agreed = False
        self._postponed: set[int] = set()
        """Tiers that were due while a save was in progress, or whose save was interrupted."""
        self._best: set[int] = set()
        """Tiers on which the last step is among the best."""

    def postpone(self, tiers: Iterable[int]) -> None:
        """Let these tiers be due after the next step. The same on every rank."""
        self._postponed.update(tiers)

    def record(self, results: Iterable[StepResult]) -> None:
        """Record results of steps."""
        for result in results:
            self._asked |= result.save & ~BUSY
            self._busy = bool(result.save & BUSY)

    def end_step(self, number: int) -> None:
        """Record the end of step `number`. With islands, collective at the end of a round."""
        self._best.clear()
        self._agreed = self._rounds is None
        if self._rounds is None or not self._rounds.ends_round(number):
            return
        timed = (tier_bit(n) for n, tier in enumerate(self._tiers) if tier.interval.steps is None)
        self._asked = sum(bit for bit in (REQUEST, *timed) if self._on_any_island(bool(self._asked & bit)))
        self._busy = self._on_any_island(self._busy)
        self._agreed = True

    def record_best(self, tiers: Iterable[int]) -> None:
        """Record the tiers that need a checkpoint of the step that has ended, because of its evaluation. The same on
        every rank.
        """
        self._best = set(tiers)

    def agree_on(self, tiers: Iterable[int]) -> list[int]:
        """Return the tiers that rank 0 passes; other ranks pass none. Collective."""
        bits = torch.tensor([sum(map(tier_bit, tiers))], dtype=torch.int64, device=self._mesh.device)
        all_reduce_sum(bits, dist.group.WORLD)
        return [number for number in range(len(self._tiers)) if int(bits.item()) & tier_bit(number)]

    def _on_any_island(self, flag: bool) -> bool:
        return any_island(flag, self._mesh.device, self._mesh.group(ISLAND))

    def due(self, step: int) -> list[int]:
        """The tiers on which all ranks save now, after `step`. Call it once a step, and again after a drain."""
        self._postponed.update(due_after(self._tiers, step))
        # One of the best cannot be postponed. Rank 0 has waited for the save in progress.
        if not self._agreed or (self._busy and not self.drains and not self._best):
            return []
        if self._asked & REQUEST:
            return list(range(len(self._tiers)))
        timed = {number for number in range(len(self._tiers)) if self._asked & tier_bit(number)}
        return sorted(self._postponed | timed | self._best)

    def answer(self, step: int) -> None:
        """All ranks save after `step`, for whatever reason: this is the requested checkpoint, if there is a request."""
        if self._asked & REQUEST and self._mesh.rank == 0:
            self._events.checkpoint_begun(step)
        self._asked = 0
        self._postponed.clear()
        self._best.clear()
