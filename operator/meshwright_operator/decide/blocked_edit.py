"""An edit that cannot be put into effect (yet): the job goes on as it was, and its conditions say so."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright_operator.decide.conditions import JobState


@dataclass(frozen=True, slots=True)
class BlockedEdit:
    """Why the spec as it stands is not what runs."""

    reason: str
    """CamelCase, for the conditions."""
    message: str
    retryable: bool
    """Whether room or other nodes can help; else only another edit can."""


def blocked_job_state(blocked_edit: BlockedEdit, revision: str, running: JobState) -> JobState:
    """Where a job stands of which `revision` goes on in the situation `running` instead of the spec as it stands.

    Never Ready, however well the old revision does: what its owner asks for now is not what runs.
    """
    message = f"{blocked_edit.message}; until then revision {revision} goes on ({running.reason}: {running.message})"
    return replace(
        running, reason=blocked_edit.reason, message=message, ready=False, stalled=not blocked_edit.retryable
    )
