"""The checkpoint of another run that a job began from (`checkpoint.resumeFrom`): `status.resumedFrom`, and an event."""

from __future__ import annotations

from pydantic import ValidationError

from meshwright.api.status import ResumedFromStatus
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.mesh_generation import rank_zero_report
from meshwright_operator.decide.observed import Observed


def report(decision: Decision) -> None:
    """Write to status what the ranks began from, and say so in an event: once, unless a later start began again."""
    found = _reported(decision.observed)
    if found is None or found == decision.status.resumed_from:
        return
    decision.status.resumed_from = found
    decision.add_event("ResumedFromOtherRun", f"Resumed from {found.path} step {found.step}")


def _reported(observed: Observed) -> ResumedFromStatus | None:
    """What the ranks of this generation report. The values are those of a user's pod."""
    received = rank_zero_report(observed)
    checkpoint = observed.spec.checkpoint
    if received is None or received.resumed_from is None or checkpoint is None or checkpoint.resume_from is None:
        return None
    try:
        return ResumedFromStatus(step=received.resumed_from.step, path=received.resumed_from.path)
    except ValidationError:
        return None
