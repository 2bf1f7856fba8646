"""Records which profile new pods use: in status for later pods of the job, and in an event for the administrator."""

from __future__ import annotations

from meshwright_operator.decide.decision import Decision
from meshwright_operator.text import sentences

PROFILE_USED = "ProfileUsed"
"""Reason of the event."""


def record_profile(decision: Decision) -> None:
    """Write the profile of pods that are created to status. Add an event when a gang starts with it."""
    observed = decision.observed
    applied = observed.profile
    record = applied.record if applied is not None else None
    changed = decision.status.applied_profile != record
    decision.status.applied_profile = record
    if applied is None or not (changed or not observed.live_pods):
        return
    grants = applied.profile.grants()
    granted = f"It grants: {'; '.join(grants)}" if grants else "It grants nothing that is restricted"
    decision.add_event(PROFILE_USED, sentences(f"The pods use the administrator's profile `{applied.name}`", granted))
