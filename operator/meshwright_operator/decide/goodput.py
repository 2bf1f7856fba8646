"""`status.goodput`: what a decision means for the ledger of the job's time.

The ledger is written with other changes of the status, and never causes a write of its own while its cause stays. What
was not written is computed again from the ledger in status, so that several decisions between two writes book no time
twice.
"""

from __future__ import annotations

from datetime import datetime

from meshwright.api import conditions as names
from meshwright.api.base import MAX_SAFE_INTEGER
from meshwright.api.conditions import find, is_true
from meshwright.api.goodput import GoodputStatus, TimeCause
from meshwright.api.status import ParallelTrainingJobStatus, ResumedFromStatus
from meshwright.protocol.messages import WorkerReport
from meshwright.protocol.run_config import CommandRun
from meshwright_operator.decide import gpu_ledger, lifecycle, restart_policy, size_status, time_ledger
from meshwright_operator.decide.admission import QUEUE_UNAVAILABLE, WAITING_FOR_QUOTA
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.external_scheduler import WAITING_FOR_SCHEDULER
from meshwright_operator.decide.mesh_generation import rank_zero_worker
from meshwright_operator.decide.missing_claims import CLAIM_NOT_FOUND
from meshwright_operator.decide.observed import Observed
from meshwright_operator.decide.placement_outcome import PREEMPTED
from meshwright_operator.decide.pod_gates import is_held
from meshwright_operator.decide.rejected_job import TERMINATING
from meshwright_operator.decide.restart_policy import cause_named
from meshwright_operator.decide.time_ledger import STEPPING, Seen, Steps
from meshwright_operator.timestamps import parse_time

STOPPED_REASONS = (PREEMPTED, WAITING_FOR_QUOTA, QUEUE_UNAVAILABLE, CLAIM_NOT_FOUND)
"""Reasons of a job that waits until it may run."""
FINISHED = ""
"""The cause of a job that has finished or is being deleted: its time does not count."""


def update_goodput(decision: Decision, created: str | None) -> None:
    """Writes to `decision.status` what the time up to now was spent on, once it is known which nodes the job gets.

    `created` is the time at which the job was created.
    """
    observed, status = decision.observed, decision.status
    if lifecycle.finished(observed.status):
        return
    old = observed.status.goodput
    seen = _seen(decision, old.cause if old is not None else "")
    if old is None:
        old = _new_ledger(observed.status, observed.now, created, seen.cause)
    status.goodput = time_ledger.advance(old, seen)


def _gpus(decision: Decision) -> int:
    """GPUs of the job's pods after the decision. Pods that it deletes run until they have stopped."""
    observed = decision.observed
    pods = len(observed.live_pods) + len(decision.create)
    return 0 if lifecycle.finished(decision.status) else pods * observed.plan.gpus_per_worker


def update_without_decision(
    status: ParallelTrainingJobStatus,
    old: ParallelTrainingJobStatus,
    now: datetime,
    created: str | None,
    *,
    has_pods: bool,
) -> None:
    """The same for a job for which no decision is made: it waits for a layout or an edit, or is being deleted.

    Without a plan, it is not known how many GPUs pods have: as many as before, until there are none.
    """
    if lifecycle.finished(old):
        return
    mesh = old.mesh
    ready = find(status.conditions, names.READY)
    if ready is not None and ready.reason == TERMINATING:
        cause = FINISHED
    elif is_true(status.conditions, names.SUSPENDED):
        cause = TimeCause.SUSPENDED
    elif mesh is None or not mesh.generation or mesh.pending_cause:
        cause = TimeCause.QUEUED
    else:
        return  # its ranks train, whatever the new spec says
    ledger = old.goodput or _new_ledger(old, now, created, cause)
    seen = Seen(now=now, cause=cause, gpus=None if has_pods else 0)
    status.goodput = time_ledger.advance(ledger, seen) if ledger.cause else ledger


def seconds_by_cause(status: ParallelTrainingJobStatus, now: datetime) -> dict[str, float]:
    """Seconds by cause up to `now`, for metrics. Those after the last step are left out: their cause is not known yet.

    Otherwise, a counter would go back when they turn out to be part of a failure.
    """
    ledger = status.goodput
    return {} if ledger is None else time_ledger.seconds_by_cause(ledger, _known_until(ledger, now))


def gpu_seconds_by_cause(status: ParallelTrainingJobStatus, now: datetime) -> dict[str, float]:
    """The same for GPU seconds. Those since the last step are left out, even if the number of GPUs has changed."""
    ledger = status.goodput
    if ledger is None:
        return {}
    if ledger.cause in STEPPING:
        return {entry.cause: (entry.gpu_milliseconds or 0) / 1000 for entry in ledger.booked}
    return gpu_ledger.gpu_seconds_by_cause(ledger, now)


def _known_until(ledger: GoodputStatus, now: datetime) -> datetime:
    return (parse_time(ledger.since) or now) if ledger.cause in STEPPING else now


def goodput_ratio(seconds: dict[str, float]) -> float | None:
    """Time of steps that count over all time that is not suspended. None if there is none."""
    total = sum(seconds.values()) - seconds.get(TimeCause.SUSPENDED, 0.0)
    return seconds.get(TimeCause.TRAINING, 0.0) / total if total > 0 else None


def _new_ledger(status: ParallelTrainingJobStatus, now: datetime, created: str | None, cause: str) -> GoodputStatus:
    """The ledger of a job that has none. A job that an earlier version has started begins now, with what it does."""
    if status.conditions or status.mesh is not None:
        step = max(status.step or 0, status.checkpoint.step if status.checkpoint is not None else 0)
        return time_ledger.begin(now, cause, step)
    # The API server's clock may be ahead.
    return time_ledger.begin(min(parse_time(created) or now, now), TimeCause.QUEUED)


def _seen(decision: Decision, before: str) -> Seen:
    """What the job does after the decision. `before` is the cause so far."""
    observed, status = decision.observed, decision.status
    steps = _steps(observed, status.resumed_from)
    ran = observed.mesh.generation > 0 and not observed.mesh.pending_cause
    ended = bool(decision.mesh.pending_cause) or decision.mesh.generation != observed.mesh.generation
    world, _, total = status.ready_ranks.partition("/")
    all_train = world == total and world not in ("", "0")
    trains_unseen = ran and not ended and all_train and isinstance(observed.run, CommandRun)
    failed_job = is_true(status.conditions, names.FAILED)
    # One decision may end a generation and form the next one.
    failed_generation = ended and cause_named(decision.mesh.pending_cause or decision.mesh.cause).is_failure
    # After a restart of the operator, the agents' first reports are missing. `before` tells that steps run: it is of
    # the current generation, because the end of one is written with another cause. An earlier version wrote none.
    stepping = steps is not None or trains_unseen or before in STEPPING or (all_train and not before)
    return Seen(
        now=observed.now,
        cause=_cause(decision, trains=stepping and not ended),
        steps=steps,
        trains_unseen=trains_unseen,
        failed=ran and (failed_job or failed_generation),
        detection_seconds=decision.detection_seconds,
        gpus=_gpus(decision),
    )


def _cause(decision: Decision, *, trains: bool) -> str:
    """What the job spends time on after the decision."""
    observed, status, mesh = decision.observed, decision.status, decision.mesh
    if lifecycle.finished(status):
        return FINISHED
    if observed.spec.suspend:
        return TimeCause.SUSPENDED
    placed = find(status.conditions, names.PLACED)
    stopped = placed is not None and placed.status == "False" and placed.reason in STOPPED_REASONS
    # A placement is replaced when nodes are granted, also if no new pods are needed.
    asks = decision.place is not None and status.placement is observed.status.placement
    if asks or (stopped and not decision.create):
        return TimeCause.QUEUED
    if is_held(status):
        return TimeCause.QUEUED
    if mesh.pending_cause or not mesh.generation:
        unbound = placed is not None and placed.status == "False" and placed.reason == WAITING_FOR_SCHEDULER
        if size_status.is_replanning(status):
            return TimeCause.RESCALING
        return TimeCause.QUEUED if unbound else _start_cause(mesh.pending_cause)
    if trains:
        return TimeCause.TRAINING
    return _start_cause(mesh.cause)


def _start_cause(cause: str) -> TimeCause:
    """What the time of a start counts as."""
    if cause == restart_policy.RESCALED.name:
        return TimeCause.RESCALING
    return TimeCause.RESTARTING if cause and cause_named(cause).restarts else TimeCause.STARTING


def _steps(observed: Observed, began: ResumedFromStatus | None) -> Steps | None:
    """The steps of the generation that ran before the decision; None before its first one. `began` is the checkpoint
    of another run that the job began from.
    """
    received = observed.agents.reports.get(rank_zero_worker(observed))
    if received is None or observed.mesh.pending_cause or isinstance(observed.run, CommandRun):
        return None
    generation = observed.mesh.generation
    if not generation or received.report.generation != generation:
        return None
    last = _last_step(received.report)
    if last is None:
        return None
    progress = received.report.progress
    seconds, stall = (progress.step_seconds, progress.checkpoint_stall_seconds) if progress is not None else (0.0, 0.0)
    return Steps(last, _first_step(observed, began, last), seconds, stall)


def _last_step(report: WorkerReport) -> int | None:
    """The last step of rank 0. There is no progress while the loss is not finite. The values are a user's pod's."""
    steps = [report.progress.step] if report.progress is not None else [r.step for r in report.ranks if r.step]
    return next((step for step in steps if 0 <= step <= MAX_SAFE_INTEGER), None)


def _first_step(observed: Observed, began: ResumedFromStatus | None, last: int) -> int:
    """The step that the generation continued from; a later one if it has saved a checkpoint since."""
    known = observed.status.checkpoint or began
    return min(known.step, last) if known is not None else 0
