"""The job's conditions, for tools that follow kstatus.

A job that runs, completed or is suspended is Ready. A job that failed or cannot run is Stalled. Any other job is
Reconciling. A job is never Reconciling and Stalled at the same time. If no agent reports, Ready is Unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from meshwright.api import conditions as names
from meshwright.api.conditions import find, with_condition
from meshwright.api.status import MAX_CONDITIONS, Condition, ParallelTrainingJobStatus
from meshwright.printable import printable
from meshwright_operator.text import sentences
from meshwright_operator.timestamps import format_time

MESSAGE_LIMIT = 1024


@dataclass(frozen=True, slots=True)
class JobState:
    """The job's state: a reason and a message."""

    reason: str
    message: str
    ready: bool = False
    stalled: bool = False
    unknown: bool = False
    """Whether it is not known if the job is ready."""

    @property
    def reconciling(self) -> bool:
        """Whether the operator is changing the job's state."""
        return not self.ready and not self.stalled


@dataclass(frozen=True, slots=True)
class BlockedEdit:
    """An edit that the operator cannot apply yet, or at all. The job keeps running its previous revision."""

    reason: str
    """CamelCase, for the conditions."""
    message: str
    retryable: bool
    """Whether the edit may fit later. If not, only another edit can resolve it."""
    retry_seconds: float = 15.0
    """Time after which a retryable edit is looked at again, if nothing wakes the job earlier."""


def blocked_job_state(blocked_edit: BlockedEdit, revision: str, running: JobState) -> JobState:
    """The state of a job that keeps running `revision`, in the state `running`, because an edit is blocked.

    It is never Ready, because the spec that the user asked for does not run.
    """
    # A suspended job is ready too, but runs nothing.
    effect = "keeps running" if running.reason == "Running" else f"stays in effect ({running.reason})"
    message = sentences(blocked_edit.message, f"Revision {revision} {effect}: {running.message}")
    return replace(
        running,
        reason=blocked_edit.reason,
        message=message,
        ready=False,
        unknown=False,
        stalled=not blocked_edit.retryable,
    )


def set_condition(
    status: ParallelTrainingJobStatus, kind: str, value: str, reason: str, message: str, generation: int, now: datetime
) -> None:
    """Sets one condition in `status`."""
    status.conditions = with_condition(
        status.conditions,
        Condition(
            type=kind,
            status=value,
            observed_generation=generation,
            last_transition_time=format_time(now),
            reason=reason,
            message=printable(message[:MESSAGE_LIMIT]),
        ),
    )


def set_job_state(status: ParallelTrainingJobStatus, job_state: JobState, generation: int, now: datetime) -> None:
    """Sets Ready, Reconciling and Stalled from `job_state`, and adds other conditions of the API that are missing."""
    for kind, value in (
        (names.READY, job_state.ready),
        (names.RECONCILING, job_state.reconciling),
        (names.STALLED, job_state.stalled),
    ):
        message = job_state.message if value or kind == names.READY else ""
        text = "Unknown" if kind == names.READY and job_state.unknown else str(value)
        set_condition(status, kind, text, job_state.reason, message, generation, now)
    if find(status.conditions, names.PLACED) is None:
        set_condition(status, names.PLACED, "Unknown", "NotPlacedYet", "", generation, now)
    for kind in (names.COMPLETE, names.FAILED, names.SUSPENDED):
        if find(status.conditions, kind) is None:
            set_condition(status, kind, "False", f"Not{kind}", "", generation, now)
    update_observed_generation(status, generation)
    by_type = {c.type: c for c in status.conditions}
    known = [by_type.pop(kind) for kind in names.KNOWN if kind in by_type]
    # Other controllers may add conditions. With more than the schema allows, nothing could be written at all.
    status.conditions = [*known, *by_type.values()][:MAX_CONDITIONS]


def update_observed_generation(status: ParallelTrainingJobStatus, generation: int) -> None:
    """Sets `observedGeneration` of all conditions, because they are true for this generation of the object too.

    Conditions of other types are those of a later version, which alone knows when they are true.
    """
    status.conditions = [
        c.model_copy(update={"observed_generation": generation}) if c.type in names.KNOWN else c
        for c in status.conditions
    ]
