"""Where a start or a recovery spent its time, told once the first step is done; and checkpoints, at most one a minute.

Kept in memory for people only: after a restart of the operator the phases it has not seen are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.api.conditions import READY, is_true
from meshwright_operator.decide.draft import Draft
from meshwright_operator.decide.ranks import leader
from meshwright_operator.events import Note

CHECKPOINT_NOTE_SECONDS = 60.0
FIRST_STEP = "first-step"


@dataclass(slots=True)
class _Start:
    """One way to a generation; moments by a monotonic clock."""

    broken: float
    detect: float
    placed: float | None = None
    formed: float | None = None
    generation: int = 0


@dataclass(slots=True)
class Chronicle:
    """What one job went through lately."""

    start: _Start | None = None
    checkpoint: int | None = None
    checkpoint_noted: float = field(default=float("-inf"))

    def follow(self, draft: Draft, clock: float) -> list[Note]:
        """Takes in one decision at the moment `clock`; what is worth telling."""
        return [*self._follow_start(draft, clock), *self._follow_checkpoint(draft, clock)]

    def _follow_start(self, draft: Draft, clock: float) -> list[Note]:
        before, after = draft.observed.mesh, draft.mesh
        forming = bool(after.pending_cause)
        formed = after.generation > before.generation
        if self.start is None and (forming or formed):
            detect = max((h.halted_for for h in draft.observed.agents.reports.values()), default=0.0)
            self.start = _Start(clock - detect, detect)
        start = self.start
        if start is None:
            return []
        if draft.create:
            start.placed = clock
        if formed:
            start.formed, start.generation = clock, after.generation
        elif forming and start.formed is not None:
            self.start = _Start(clock, 0.0)
        elif start.formed is not None and start.generation == after.generation:
            return self._finish(draft, start, start.formed, clock)
        return []

    def _finish(self, draft: Draft, start: _Start, formed: float, clock: float) -> list[Note]:
        heard = draft.observed.agents.reports.get(leader(draft.observed))
        if heard is None or heard.report.generation != start.generation:
            return []
        phases = {phase.name: phase.seconds for phase in heard.report.phases}
        trains = FIRST_STEP in phases
        if draft.observed.spec.runtime.command is not None:
            # A command of the user's tells no phases: its ranks run, and that is all there is to see.
            trains = is_true(draft.status.conditions, READY)
        if not trains:
            return []
        self.start = None
        cause = draft.mesh.cause
        first = start.generation == 1
        parts = _parts(start, formed, recovering=not first) | phases
        total = formed - start.broken + sum(phases.values())
        text = ", ".join(f"{name.replace('-', ' ')} {max(0.0, seconds):.1f}" for name, seconds in parts.items())
        word, reason = ("started", "Started") if first else ("recovered", "Recovered")
        return [Note(reason, f"{word} in {total:.1f} s: {text} (generation {start.generation}, {cause})")]

    def _follow_checkpoint(self, draft: Draft, clock: float) -> list[Note]:
        checkpoint = draft.status.checkpoint
        if checkpoint is None or checkpoint.step == self.checkpoint:
            return []
        seen_first = self.checkpoint is None and draft.observed.status.checkpoint is not None
        if not seen_first and clock - self.checkpoint_noted < CHECKPOINT_NOTE_SECONDS:
            return []
        self.checkpoint = checkpoint.step
        if seen_first:
            return []
        self.checkpoint_noted = clock
        return [Note("CheckpointSaved", f"the checkpoint of step {checkpoint.step} is complete")]


def _parts(start: _Start, formed: float, *, recovering: bool) -> dict[str, float]:
    """The operator's part of the way, by phase."""
    begun = start.broken + start.detect
    if not recovering:
        return {"place": (start.placed or begun) - begun, "start pods": formed - (start.placed or begun)}
    if start.placed is None:
        return {"detect": start.detect, "gather": formed - begun}
    return {"detect": start.detect, "drain": start.placed - begun, "replace pod": formed - start.placed}
