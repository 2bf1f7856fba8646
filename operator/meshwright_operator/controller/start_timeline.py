"""Events with the seconds of each phase of a start or recovery, after its first step, and events of new checkpoints.

Checkpoints are reported at most once a minute, and the last one when the job has finished: nothing need be decided
about it later. The state is in memory only: after a restart of the operator, phases that it has not observed are left
out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.api.conditions import READY, is_true
from meshwright.protocol.run_config import CommandRun
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.lifecycle import finished
from meshwright_operator.decide.mesh_generation import rank_zero_worker
from meshwright_operator.kube.job_event import JobEvent

CHECKPOINT_EVENT_SECONDS = 60.0
FIRST_STEP = "first-step"


@dataclass(slots=True)
class _Start:
    """One start of a generation. Times are of a monotonic clock."""

    failed_at: float
    detection_seconds: float
    placed: float | None = None
    formed_at: float | None = None
    generation: int = 0


@dataclass(slots=True)
class StartTimeline:
    """The current start and the last reported checkpoint of one job."""

    start: _Start | None = None
    checkpoint: int | None = None
    checkpoint_posted_at: float = field(default=float("-inf"))

    def update(self, decision: Decision, clock: float) -> list[JobEvent]:
        """Record a decision at the time `clock`, and return the events to post."""
        return [*self._update_start(decision, clock), *self._update_checkpoint(decision, clock)]

    def _update_start(self, decision: Decision, clock: float) -> list[JobEvent]:
        before, after = decision.observed.mesh, decision.mesh
        forming = bool(after.pending_cause)
        formed_at = after.generation > before.generation
        if self.start is None and (forming or formed_at):
            # Agents that only join have waited longer than the ranks of this generation.
            received = [
                r for r in decision.observed.agents.reports.values() if r.report.generation == before.generation
            ]
            detection_seconds = max((r.halted_seconds for r in received), default=0.0)
            self.start = _Start(clock - detection_seconds, detection_seconds)
        start = self.start
        if start is None:
            return []
        if decision.create:
            start.placed = clock
        if formed_at:
            start.formed_at, start.generation = clock, after.generation
        elif forming and start.formed_at is not None:
            self.start = _Start(clock, 0.0)
        elif start.formed_at is not None and start.generation == after.generation:
            return self._finish(decision, start, start.formed_at)
        return []

    def _finish(self, decision: Decision, start: _Start, formed_at: float) -> list[JobEvent]:
        received = decision.observed.agents.reports.get(rank_zero_worker(decision.observed))
        if received is None or received.report.generation != start.generation:
            return []
        phases = {phase.name: phase.seconds for phase in received.report.phases}
        trains = FIRST_STEP in phases
        if isinstance(decision.observed.run, CommandRun):
            # A user's command reports no phases: only its running ranks are known.
            trains = is_true(decision.status.conditions, READY)
        if not trains:
            return []
        self.start = None
        cause = decision.mesh.cause
        first = start.generation == 1
        parts = _parts(start, formed_at, recovering=not first) | phases
        total = formed_at - start.failed_at + sum(phases.values())
        text = ", ".join(f"{name.replace('-', ' ')} {max(0.0, seconds):.1f}" for name, seconds in parts.items())
        word, reason = ("Training", "Started") if first else ("Training again", "Recovered")
        return [JobEvent(reason, f"{word} after {total:.1f} s: {text} (generation {start.generation}, {cause})")]

    def _update_checkpoint(self, decision: Decision, clock: float) -> list[JobEvent]:
        checkpoint = decision.status.checkpoint
        if checkpoint is None or checkpoint.step == self.checkpoint:
            return []
        seen_first = self.checkpoint is None and decision.observed.status.checkpoint is not None
        waits = clock - self.checkpoint_posted_at < CHECKPOINT_EVENT_SECONDS and not finished(decision.status)
        if waits and not seen_first:
            return []
        self.checkpoint = checkpoint.step
        if seen_first:
            return []
        self.checkpoint_posted_at = clock
        return [JobEvent("CheckpointSaved", f"Saved the checkpoint of step {checkpoint.step}")]


def _parts(start: _Start, formed_at: float, *, recovering: bool) -> dict[str, float]:
    """Seconds of the operator's part of the start, by phase."""
    begun = start.failed_at + start.detection_seconds
    if not recovering:
        return {"place": (start.placed or begun) - begun, "start pods": formed_at - (start.placed or begun)}
    if start.placed is None:
        return {"detect": start.detection_seconds, "gather": formed_at - begun}
    return {"detect": start.detection_seconds, "drain": start.placed - begun, "replace pod": formed_at - start.placed}
