"""The status of a job for which no decision is made: its spec is rejected, no layout fits, or the job is finished."""

from __future__ import annotations

from datetime import datetime

from meshwright.api import conditions as names
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright_operator.decide.conditions import JobState, set_condition, set_job_state, update_observed_generation

NO_LAYOUT = "NoLayout"
"""Reason of a job for which no layout fits the cluster's nodes."""


def rejected(
    old: ParallelTrainingJobStatus, generation: int, now: datetime, reason: str, message: str
) -> ParallelTrainingJobStatus:
    """The status of a job with a rejected spec. Its pods, if any, are not touched."""
    status = old.model_copy(deep=True)
    status.observed_generation = generation
    set_job_state(status, JobState(reason, message, stalled=True), generation, now)
    return status


def unplannable(
    old: ParallelTrainingJobStatus, generation: int, now: datetime, message: str, *, suspended: bool = False
) -> ParallelTrainingJobStatus:
    """The status of a job for which no layout fits the cluster now. New nodes may change that."""
    status = old.model_copy(deep=True)
    status.observed_generation = generation
    set_condition(status, names.PLACED, "False", NO_LAYOUT, message, generation, now)
    reason = "SuspendedByUser" if suspended else "NotSuspended"
    set_condition(status, names.SUSPENDED, str(suspended), reason, "", generation, now)
    job_state = JobState("Suspended", message, ready=True) if suspended else JobState("Placing", message)
    set_job_state(status, job_state, generation, now)
    return status


def unchanged(old: ParallelTrainingJobStatus, generation: int) -> ParallelTrainingJobStatus:
    """The status of a finished job, whose spec no longer matters."""
    status = old.model_copy(deep=True)
    status.observed_generation = generation
    update_observed_generation(status, generation)
    return status
