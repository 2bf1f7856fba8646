"""The job's life cycle: active time, deadline, completion, and its time to live after that."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from meshwright.api import conditions as names
from meshwright.api.conditions import is_true
from meshwright.api.spec import ParallelTrainingJobSpec, SuccessPolicy
from meshwright.api.status import ParallelTrainingJobStatus, added
from meshwright.protocol.messages import AgentState
from meshwright.protocol.run_config import NativeRun
from meshwright.rules.recovery_times import LOSSES
from meshwright_operator.decide import restart_policy
from meshwright_operator.decide.mesh_generation import rank_zero_worker
from meshwright_operator.decide.observed import GONE, LOST_WITH_POD, Observed, PodState, Worker
from meshwright_operator.timestamps import format_time, parse_time, seconds_since

EXIT_SECONDS = 120.0
"""Seconds in which pods should exit after all ranks have completed. Then the job is complete without that."""


def finished(status: ParallelTrainingJobStatus) -> bool:
    """Whether the job completed or failed. Nothing restarts a finished job.

    A merge patch of another controller may replace all conditions. Then the completion time still shows that it did.
    """
    return has_result(status) or status.completion_time is not None


def has_result(status: ParallelTrainingJobStatus) -> bool:
    """Whether a condition says that the job completed, or that it failed."""
    return is_true(status.conditions, names.COMPLETE) or is_true(status.conditions, names.FAILED)


def succeeded(observed: Observed) -> bool:
    """Whether the workers that the success policy names have succeeded, with the current revision of the spec."""
    required = _required(observed)
    if not required or observed.mesh.generation == 0:
        return False
    witnesses = observed.workers if isinstance(observed.run, NativeRun) else required
    return _completed_before_loss(observed) or (
        all(_succeeded(observed, worker) for worker in required)
        and any(worker.state is PodState.SUCCEEDED for worker in witnesses)
    )


def all_completed(observed: Observed) -> bool:
    """Whether the workers that the success policy names have completed the run, whether their pods exit or not.

    The last report of an agent, or its copy in status, says so. A worker that was lost when the run ended reports
    nothing, and keeps the others from nothing but the end of their processes.
    """
    required = _required(observed)
    crashed = any(worker.state is PodState.CRASHED for worker in required)
    if not required or observed.mesh.generation == 0 or crashed:
        return False
    lost = run_ends(observed) and any(worker.state in GONE and not worker.completed for worker in observed.workers)
    return lost or all(worker.completed for worker in required)


def run_ends(observed: Observed) -> bool:
    """Whether a worker has completed the current run of the built-in runtime: the others have no step left.

    The last step is collective, and so is the save after it, without which no rank completes the run.
    """
    return _runs_together(observed) and not observed.mesh.pending_cause and any(w.completed for w in observed.workers)


def _runs_together(observed: Observed) -> bool:
    """Whether the current generation is one of the built-in runtime, with the current revision of the spec."""
    plan = observed.status.plan
    same = plan is not None and plan.revision in ("", observed.revision)
    return same and observed.mesh.generation > 0 and isinstance(observed.run, NativeRun)


def _completed_before_loss(observed: Observed) -> bool:
    """Whether a worker has completed the run that a lost worker seemed to end: its loss was seen before their end.

    The proof is a report of that generation, or a pod whose ranks were part of it.
    """
    cause, formed = observed.mesh.pending_cause, parse_time(observed.mesh.started_time)
    if cause not in LOSSES or restart_policy.cause_named(cause).limited or not _runs_together(observed):
        return False
    reports = (received.report for received in observed.agents.reports.values())
    if any(r.state is AgentState.COMPLETE and r.generation == observed.mesh.generation for r in reports):
        return True
    pods = [worker.pod for worker in observed.workers if worker.state is PodState.SUCCEEDED and worker.pod is not None]
    return formed is not None and any(pod.created is not None and pod.created <= formed for pod in pods)


def exit_left(status: ParallelTrainingJobStatus, now: datetime) -> float | None:
    """Seconds left for the pods to exit after all ranks completed; None before that."""
    since = parse_time(status.mesh.completed_time) if status.mesh is not None else None
    return EXIT_SECONDS - (now - since).total_seconds() if since is not None else None


def _required(observed: Observed) -> Sequence[Worker]:
    """The workers that the success policy names."""
    first = observed.spec.success_policy is SuccessPolicy.FIRST_WORKER
    zero = rank_zero_worker(observed) if first and observed.workers else None
    return [worker for worker in observed.workers if zero is None or worker.index == zero]


def _succeeded(observed: Observed, worker: Worker) -> bool:
    """Whether a worker has succeeded. Without a pod, only in the current generation.

    Ranks of the built-in runtime end together, because their last step is collective. So a worker whose pod is lost has
    succeeded if another one has. `succeeded` checks that there is one, and that no worker runs.
    """
    if worker.pod is not None and worker.state is PodState.SUCCEEDED:
        return worker.pod.revision == observed.revision
    plan = observed.status.plan
    if observed.mesh.pending_cause or plan is None or plan.revision not in ("", observed.revision):
        return False
    ends_with_others = worker.state in LOST_WITH_POD and isinstance(observed.run, NativeRun)
    return worker.state is PodState.SUCCEEDED or ends_with_others


def begin(status: ParallelTrainingJobStatus, now: datetime) -> None:
    """Starts the job's clock when its pods are created, or resumes it after a suspension."""
    if status.start_time is None:
        status.start_time = format_time(now)
    if status.active_since is None:
        status.active_since = format_time(now)


def pause(status: ParallelTrainingJobStatus, now: datetime) -> None:
    """Stops the job's clock."""
    status.active_seconds = added(status.active_seconds, int(seconds_since(status.active_since, now)))
    status.active_since = None


def deadline_left(spec: ParallelTrainingJobSpec, status: ParallelTrainingJobStatus, now: datetime) -> float | None:
    """Seconds until `spec.activeDeadlineSeconds` is reached, below 0 afterwards. None if the clock does not run."""
    if spec.active_deadline_seconds is None or parse_time(status.active_since) is None:
        return None
    return spec.active_deadline_seconds - status.active_seconds - seconds_since(status.active_since, now)


def ttl_left(
    spec: ParallelTrainingJobSpec, status: ParallelTrainingJobStatus, now: datetime, default: int | None = None
) -> float | None:
    """Seconds until a finished job is deleted, below 0 if that is overdue. None if the job is not deleted.

    `default` are the seconds for a spec without any.
    """
    ended = parse_time(status.completion_time)
    seconds = default if spec.ttl_seconds_after_finished is None else spec.ttl_seconds_after_finished
    if seconds is None or ended is None:
        return None
    return seconds - (now - ended).total_seconds()
