"""Metrics of jobs, computed when they are scraped: a job that is deleted takes its series with it."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from meshwright.api import conditions as names
from meshwright.api.conditions import find
from meshwright.api.status import MAX_SAFE_INTEGER, ParallelTrainingJobStatus
from meshwright.protocol.messages import Progress
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.timestamps import parse_time

JOB = ["namespace", "job_name"]
LONGEST_STEP_SECONDS = 86400.0
"""What an agent tells beyond it is not believed."""


@dataclass(slots=True)
class JobRecord:
    """What is remembered of one job for its metrics."""

    uid: str
    status: ParallelTrainingJobStatus = field(default_factory=ParallelTrainingJobStatus)
    phase: str = ""
    since: float = 0.0
    wallclock: dict[str, float] = field(default_factory=dict)
    productive: float = 0.0
    furthest_step: int | None = None
    lost_steps: int = 0
    last_step: int | None = None

    def put(self, status: ParallelTrainingJobStatus, progress: Progress | None, clock: float) -> None:
        """Takes in the job's status and its newest progress at the moment `clock`."""
        self.status = status
        self._add_elapsed(clock)
        self.phase = phase_of(status)
        # From a tenant's pod: what would fit no number is no progress.
        if progress is None or not 0 <= progress.step <= MAX_SAFE_INTEGER:
            return
        step = progress.step
        seconds = progress.step_seconds if 0 <= progress.step_seconds <= LONGEST_STEP_SECONDS else 0.0
        if self.furthest_step is None:
            self.furthest_step = step
        if step > self.furthest_step:
            self.productive += (step - self.furthest_step) * seconds
            self.furthest_step = step
        if self.last_step is not None and step < self.last_step:
            self.lost_steps += self.last_step - step
        self.last_step = step

    def seconds_by_phase(self, clock: float) -> dict[str, float]:
        """Seconds by phase, up to the moment `clock`."""
        self._add_elapsed(clock)
        return dict(self.wallclock)

    def _add_elapsed(self, clock: float) -> None:
        if self.phase:
            self.wallclock[self.phase] = self.wallclock.get(self.phase, 0.0) + clock - self.since
        self.since = clock


def phase_of(status: ParallelTrainingJobStatus) -> str:
    """Where the job's time goes now; empty once it has ended, and for one that is invalid and never started."""
    ready = find(status.conditions, names.READY)
    reason = ready.reason if ready is not None else ""
    started = status.mesh is not None and status.mesh.generation > 0
    if status.completion_time is not None or (reason == "InvalidSpec" and not started):
        return ""
    if reason in ("Suspended", "Suspending"):
        return "suspended"
    # An edit that is held back makes a job unready whose ranks train all the same.
    training, _, world = status.ready_ranks.partition("/")
    if training == world and world not in ("", "0"):
        return "training"
    if reason in ("", "Placing"):
        return "queued"
    return (
        "starting" if status.mesh is None or status.mesh.generation <= 1 and not status.restart_count else "restarting"
    )


class JobsCollector(Collector):
    """All jobs as series."""

    def __init__(self) -> None:
        self._records: dict[JobKey, JobRecord] = {}

    def record(self, key: JobKey, uid: str) -> JobRecord:
        """The record of this job; a new one when another job took its name."""
        known = self._records.get(key)
        if known is None or known.uid != uid:
            known = self._records[key] = JobRecord(uid, since=time.monotonic())
        return known

    def forget(self, key: JobKey) -> None:
        """Drops the job's series."""
        self._records.pop(key, None)

    def collect(self) -> Iterable[Metric]:
        """Every series, from what is known now."""
        records = list(self._records.items())
        yield _jobs(records)
        yield from _states(records)
        yield from _restarts(records)
        yield from _placements(records)
        yield from _time(records)
        yield from _training(records)
        yield from _evaluation(records)


Records = list[tuple[JobKey, JobRecord]]


def _jobs(records: Records) -> Metric:
    family = GaugeMetricFamily("ptj_jobs", "Jobs by where their time goes.", labels=["namespace", "state"])
    counts = Counter((key.namespace, record.phase or "finished") for key, record in records)
    for labels, count in counts.items():
        family.add_metric(labels, count)
    return family


def _states(records: Records) -> Iterator[Metric]:
    info = GaugeMetricFamily("ptj_job_info", "1 for every job.", labels=[*JOB, "uid", "tp", "pp", "dp"])
    condition = GaugeMetricFamily(
        "ptj_job_status_condition", "1 for the status that a condition has.", labels=[*JOB, "type", "status"]
    )
    ranks = GaugeMetricFamily("ptj_job_ranks", "Ranks of the job: all, and those that train.", labels=[*JOB, "state"])
    for key, record in records:
        plan = record.status.plan
        degrees = [str(plan.tensor), str(plan.pipeline), str(plan.data)] if plan is not None else ["", "", ""]
        info.add_metric([*key, record.uid, *degrees], 1)
        for entry in record.status.conditions:
            condition.add_metric([*key, entry.type, entry.status], 1)
        training, _, total = record.status.ready_ranks.partition("/")
        if training.isdigit() and total.isdigit():
            ranks.add_metric([*key, "training"], int(training))
            ranks.add_metric([*key, "total"], int(total))
    yield from (info, condition, ranks)


def _restarts(records: Records) -> Iterator[Metric]:
    family = CounterMetricFamily("ptj_job_restarts", "Restarts by cause.", labels=[*JOB, "cause"])
    for key, record in records:
        for entry in record.status.restarts:
            family.add_metric([*key, entry.cause], entry.count)
    yield family


def _placements(records: Records) -> Iterator[Metric]:
    cost = GaugeMetricFamily(
        "ptj_job_placement_cost",
        "Weighted crossings of NVLink domains, racks and zones by the job's groups.",
        labels=JOB,
    )
    straddling = GaugeMetricFamily(
        "ptj_job_straddling_groups",
        "Tensor-parallel groups that leave their NVLink domain, replicas whose pipeline leaves its rack.",
        labels=[*JOB, "kind"],
    )
    for key, record in records:
        placement = record.status.placement
        if placement is None:
            continue
        with contextlib.suppress(ValueError):
            cost.add_metric(list(key), float(placement.cost))
        straddling.add_metric([*key, "tensor"], placement.straddling_tensor_groups)
        straddling.add_metric([*key, "replica"], placement.straddling_replicas)
    yield from (cost, straddling)


def _time(records: Records) -> Iterator[Metric]:
    wallclock = CounterMetricFamily(
        "ptj_job_wallclock_seconds", "Time of the job by phase, since the operator started.", labels=[*JOB, "phase"]
    )
    productive = CounterMetricFamily(
        "ptj_job_productive_seconds", "Time spent on steps done for the first time.", labels=JOB
    )
    lost = CounterMetricFamily("ptj_job_lost_steps", "Steps that were done again after a restart.", labels=JOB)
    now = time.monotonic()
    for key, record in records:
        for phase, seconds in record.seconds_by_phase(now).items():
            wallclock.add_metric([*key, phase], seconds)
        productive.add_metric(list(key), record.productive)
        lost.add_metric(list(key), record.lost_steps)
    yield from (wallclock, productive, lost)


def _training(records: Records) -> Iterator[Metric]:
    step = GaugeMetricFamily("ptj_job_step", "Last finished step that status tells.", labels=JOB)
    generation = GaugeMetricFamily("ptj_job_mesh_generation", "Number of the mesh generation.", labels=JOB)
    checkpoint_step = GaugeMetricFamily(
        "ptj_job_last_checkpoint_step", "Step of the newest complete checkpoint.", labels=JOB
    )
    checkpoint_time = GaugeMetricFamily(
        "ptj_job_last_checkpoint_timestamp_seconds", "When the newest complete checkpoint was made.", labels=JOB
    )
    for key, record in records:
        status = record.status
        if status.step is not None:
            step.add_metric(list(key), status.step)
        if status.mesh is not None:
            generation.add_metric(list(key), status.mesh.generation)
        moment = parse_time(status.checkpoint.time) if status.checkpoint is not None else None
        if status.checkpoint is not None and moment is not None:
            checkpoint_step.add_metric(list(key), status.checkpoint.step)
            checkpoint_time.add_metric(list(key), moment.timestamp())
    yield from (step, generation, checkpoint_step, checkpoint_time)


def _evaluation(records: Records) -> Iterator[Metric]:
    step = GaugeMetricFamily(
        "ptj_job_evaluation_step", "Step after which the newest evaluation was done that status tells.", labels=JOB
    )
    loss = GaugeMetricFamily(
        "ptj_job_evaluation_loss", "Mean loss per token of that evaluation, on documents never trained on.", labels=JOB
    )
    perplexity = GaugeMetricFamily("ptj_job_evaluation_perplexity", "Exponential of that loss.", labels=JOB)
    for key, record in records:
        found = record.status.evaluation
        if found is None:
            continue
        with contextlib.suppress(ValueError):
            step.add_metric(list(key), found.step)
            loss.add_metric(list(key), float(found.loss))
            perplexity.add_metric(list(key), float(found.perplexity))
    yield from (step, loss, perplexity)
