"""The status of a job for which no decision is made: its spec is rejected, no layout fits, or the job is finished or
being deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from meshwright.api import conditions as names
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright_operator.decide import lifecycle
from meshwright_operator.decide.conditions import JobState, set_condition, set_job_state, update_observed_generation
from meshwright_operator.decide.stuck_pods import describe, is_stuck
from meshwright_operator.kube.pod_info import Pod
from meshwright_operator.text import counted, sentences

TERMINATING = "Terminating"
MAX_NAMED_FINALIZERS = 3


def rejected(
    old: ParallelTrainingJobStatus, generation: int, now: datetime, reason: str, message: str
) -> ParallelTrainingJobStatus:
    """The status of a job with a rejected spec. Its pods, if any, are not touched."""
    status = old.separate()
    status.observed_generation = generation
    set_job_state(status, JobState(reason, message, stalled=True), generation, now)
    return status


def unplannable(
    old: ParallelTrainingJobStatus, generation: int, now: datetime, message: str, *, suspended: bool = False
) -> ParallelTrainingJobStatus:
    """The status of a job for which no layout fits the cluster now. New nodes may change that."""
    status = old.separate()
    status.observed_generation = generation
    set_condition(status, names.PLACED, "False", names.NO_LAYOUT, message, generation, now)
    reason = "SuspendedByUser" if suspended else "NotSuspended"
    set_condition(status, names.SUSPENDED, str(suspended), reason, "", generation, now)
    job_state = JobState("Suspended", message, ready=True) if suspended else JobState("Placing", message)
    set_job_state(status, job_state, generation, now)
    return status


def unchanged(old: ParallelTrainingJobStatus, generation: int) -> ParallelTrainingJobStatus:
    """The status of a finished job, whose spec no longer matters."""
    status = old.separate()
    status.observed_generation = generation
    update_observed_generation(status, generation)
    return status


def terminating(
    old: ParallelTrainingJobStatus,
    generation: int,
    now: datetime,
    *,
    live_pods: Sequence[Pod],
    finalizers: Sequence[str],
) -> ParallelTrainingJobStatus:
    """The status of a job that is being deleted, but that finalizers keep. It has no pods soon, and gets no new ones.

    Args:
        old: The job's status.
        generation: `metadata.generation`.
        now: The current time.
        live_pods: Its pods that may still run.
        finalizers: `metadata.finalizers`.
    """
    status = old.separate()
    status.observed_generation = generation
    stuck = [pod for pod in live_pods if is_stuck(pod, now)]
    named = ", ".join(finalizers[:MAX_NAMED_FINALIZERS])
    more = f" and {len(finalizers) - MAX_NAMED_FINALIZERS} more" if len(finalizers) > MAX_NAMED_FINALIZERS else ""
    message = (
        sentences(f"The job is being deleted. Waiting for {counted(len(live_pods), 'pod')} to exit", describe(stuck))
        if live_pods
        else f"The job is being deleted, and all its pods have exited. It remains until its finalizers are removed: "
        f"{named}{more}"
    )
    if status.ready_ranks:
        status.ready_ranks = f"0/{status.ready_ranks.partition('/')[2]}"
    status.tokens_per_second = status.eta_seconds = None
    if status.active_since is not None:
        lifecycle.pause(status, now)
    if status.placement is not None:
        status.placement.spares = []
    set_condition(status, names.PLACED, "False", TERMINATING, "", generation, now)
    set_job_state(status, JobState(TERMINATING, message), generation, now)
    return status
