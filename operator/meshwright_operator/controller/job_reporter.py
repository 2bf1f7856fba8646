"""Reports what the operator does about a job, to its user: status with conditions, events, and metrics.

What is stored here between two reconciles is in memory only, and affects only events and metrics.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from datetime import datetime

from meshwright.api.conditions import READY, is_true
from meshwright.api.goodput import GoodputStatus, TimeCause
from meshwright.api.objects import KubeObject
from meshwright.api.parsing import parse_status
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright.protocol.messages import Progress
from meshwright.rules.checkpoint_interval import interval_in_steps
from meshwright_operator.controller.observe import JobRejectedError, suspended_by_user
from meshwright_operator.controller.start_timeline import StartTimeline
from meshwright_operator.controller.status_patch import StatusRejectedError, StatusWriter
from meshwright_operator.decide import goodput, lifecycle, rejected_job
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.goodput import FINISHED
from meshwright_operator.decide.hang_detection import silence
from meshwright_operator.decide.mesh_generation import rank_zero_worker
from meshwright_operator.decide.observed import Observed, has_started
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.kube.client import ApiError
from meshwright_operator.kube.job_event import WARNING, JobEvent
from meshwright_operator.kube.pod_info import Pod
from meshwright_operator.kube.recorder import EventRecorder
from meshwright_operator.metrics.job_metrics import JobMetrics
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.timestamps import seconds_since, utc_now

log = logging.getLogger(__name__)

USER_ERROR_CODES = (400, 403, 422)
"""Responses of the API server that a user may be able to resolve: only these errors get an event."""


class JobReporter:
    """Writes the status of jobs, posts events about them, and updates their metrics."""

    def __init__(
        self,
        writer: StatusWriter,
        events: EventRecorder,
        metrics: OperatorMetrics,
        jobs: JobMetrics,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._writer = writer
        self._events = events
        self._metrics = metrics
        self._jobs = jobs
        self._now = now
        self._timelines: dict[str, StartTimeline] = {}
        self._events_without_status: dict[str, str] = {}
        """By uid, the message of the event that was posted because the status could not be written."""

    async def write_status(self, key: JobKey, job: KubeObject, decision: Decision) -> None:
        """Write the status of a decision, which must be persisted before anything is done.

        Raises:
            ConflictError: The job has changed since it was read.
            StatusRejectedError: The API server rejects any status for the stored object.
        """
        await self._writer.write(key, job, decision.status, bool(decision.events))

    async def refresh(self, key: JobKey) -> None:
        """Read the job again, because the cache is out of date."""
        await self._writer.refresh(key)

    def report(self, key: JobKey, job: KubeObject, decision: Decision) -> None:
        """Post the events of a decision whose status is written, and update the job's metrics."""
        observed = decision.observed
        timeline = self._timelines.setdefault(observed.uid, StartTimeline())
        for event in [*decision.events, *timeline.update(decision, time.monotonic())]:
            self._events.post(job, event)
        received = observed.agents.reports.get(rank_zero_worker(observed))
        current = received is not None and received.report.generation == observed.mesh.generation
        progress = received.report.progress if received is not None and current else None
        runs = decision.mesh.generation > 0 and not decision.mesh.pending_cause
        oldest = silence(observed).oldest_seconds if runs else None
        spent = self._spent(decision.status)
        compute = observed.agents.compute if runs else None
        self._jobs.record(key, observed.uid).put(
            decision.status, progress, time.monotonic(), oldest, *spent, _checkpoint_steps(decision, progress), compute
        )
        self._observe_queue_wait(observed, decision.status)
        started = is_true(decision.status.conditions, READY) and not is_true(observed.status.conditions, READY)
        if started and observed.mesh.generation == 1 and not lifecycle.finished(decision.status):
            created = job["metadata"].get("creationTimestamp")
            self._metrics.startup_seconds.observe(seconds_since(created, observed.now))

    async def report_rejected(
        self, key: JobKey, job: KubeObject, rejection: JobRejectedError, *, live_pods: Sequence[Pod] = ()
    ) -> None:
        """Report once why the job cannot run. It is not suspended while it has live pods.

        Raises:
            ConflictError: The job has changed since it was read.
            StatusRejectedError: The API server rejects any status for the stored object.
        """
        uid = job["metadata"]["uid"]
        old = parse_status(job)
        status = self._rejected_status(job, old, rejection, suspended=suspended_by_user(job) and not live_pods)
        created = job["metadata"].get("creationTimestamp")
        goodput.update_without_decision(status, old, self._now(), created, has_pods=bool(live_pods))
        event = JobEvent("PlacementFailed" if rejection.retryable else rejection.reason, rejection.message, WARNING)
        try:
            if await self._writer.write(key, job, status, False) and not lifecycle.finished(old):
                self._events.post(job, event)
        except StatusRejectedError:
            if self._events_without_status.get(uid) != event.message:
                self._events_without_status[uid] = event.message
                self._events.post(job, event)
            raise
        finally:
            self._jobs.record(key, uid).put(status, None, time.monotonic(), None, *self._spent(status))

    async def report_terminating(
        self, key: JobKey, job: KubeObject, *, live_pods: Sequence[Pod], finalizers: Sequence[str]
    ) -> None:
        """Report that the job is being deleted.

        Raises:
            ConflictError: The job has changed since it was read.
        """
        old, generation = parse_status(job), int(job["metadata"].get("generation", 0))
        status = rejected_job.terminating(old, generation, self._now(), live_pods=live_pods, finalizers=finalizers)
        created = job["metadata"].get("creationTimestamp")
        goodput.update_without_decision(status, old, self._now(), created, has_pods=bool(live_pods))
        # The number of pods that have not exited yet is progress. That none is left is written at once.
        try:
            await self._writer.write(key, job, status, not live_pods)
        except StatusRejectedError:
            log.info("status of a job that is being deleted was rejected", extra={"job": str(key)})
        uid, spent = job["metadata"]["uid"], self._spent(status)
        self._jobs.record(key, uid).put(status, None, time.monotonic(), None, *spent)

    def _observe_queue_wait(self, observed: Observed, status: ParallelTrainingJobStatus) -> None:
        """Observe how long a job waited for nodes, when it has got them."""
        before, after = observed.status.goodput, status.goodput
        # A new job that gets nodes at once has no ledger before.
        waited = before.cause == TimeCause.QUEUED if before is not None else not has_started(observed.status)
        if not waited or after is None or after.cause in (FINISHED, TimeCause.QUEUED, TimeCause.SUSPENDED):
            return
        self._metrics.queue_wait_seconds.observe(_queued(after) - (_queued(before) if before is not None else 0.0))

    def _spent(self, status: ParallelTrainingJobStatus) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds and GPU seconds by cause."""
        now = self._now()
        return goodput.seconds_by_cause(status, now), goodput.gpu_seconds_by_cause(status, now)

    def post(self, job: KubeObject, event: JobEvent) -> None:
        """Post an event of a job whose status another cluster writes."""
        self._events.post(job, event)

    def report_error(self, job: KubeObject, error: Exception) -> None:
        """Post an event about an error, if the user can do something about it."""
        if isinstance(error, ApiError) and error.code not in USER_ERROR_CODES:
            return
        if isinstance(error, StatusRejectedError) and job["metadata"]["uid"] in self._events_without_status:
            return
        if isinstance(error, ApiError):
            event = JobEvent("RequestRejected", f"The API server rejected a request: {error}", WARNING)
        else:
            message = f"Retrying with backoff after an error: {type(error).__name__}: {error}"
            event = JobEvent("ReconcileFailed", message, WARNING)
        with contextlib.suppress(Exception):
            self._events.post(job, event)

    def forget(self, key: JobKey, uid: str) -> None:
        """Drop the state of a deleted job."""
        self._timelines.pop(uid, None)
        self._writer.forget(uid)
        self._events_without_status.pop(uid, None)
        self._jobs.forget(key)

    def _rejected_status(
        self, job: KubeObject, old: ParallelTrainingJobStatus, rejection: JobRejectedError, *, suspended: bool
    ) -> ParallelTrainingJobStatus:
        generation = int(job["metadata"].get("generation", 0))
        if lifecycle.finished(old):
            return rejected_job.unchanged(old, generation)
        if rejection.retryable:
            return rejected_job.unplannable(old, generation, self._now(), rejection.message, suspended=suspended)
        return rejected_job.rejected(old, generation, self._now(), rejection.reason, rejection.message)


def _checkpoint_steps(decision: Decision, progress: Progress | None) -> int | None:
    """Steps between the job's checkpoints. None if an interval in time is not known yet, and for a user's command,
    which saves when it likes.
    """
    checkpoint = decision.observed.spec.checkpoint
    if checkpoint is None or decision.observed.spec.runtime.command:
        return None
    if checkpoint.every is None:
        return checkpoint.interval
    seconds = [tier.interval_seconds for tier in decision.status.checkpoint_tiers or () if tier.interval_seconds]
    step_seconds = progress.step_seconds if progress is not None else 0.0
    return interval_in_steps(min(seconds), step_seconds) if seconds and 0 < step_seconds < math.inf else None


def _queued(ledger: GoodputStatus) -> float:
    """Seconds that are booked to the wait for nodes."""
    return sum(entry.milliseconds for entry in ledger.booked if entry.cause == TimeCause.QUEUED) / 1000
