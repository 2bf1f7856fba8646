"""Metrics of jobs, computed when they are scraped. The series of a deleted job disappear."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from meshwright.api import conditions as names
from meshwright.api.base import MAX_SAFE_INTEGER
from meshwright.api.conditions import find
from meshwright.api.goodput import TimeCause
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright.metrics.declaration import Catalog, Kind, Label, Metric, Sample
from meshwright.metrics.exporter import scraped
from meshwright.protocol.messages import Progress
from meshwright_operator.decide.goodput import goodput_ratio
from meshwright_operator.decide.time_ledger import STEPPING
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.timestamps import parse_time

NAMESPACE = Label("namespace", meaning="the job's namespace")
JOB = (NAMESPACE, Label("job_name", meaning="the job's name"))
PHASES = ("queued", "starting", "training", "restarting", "suspended", "unknown")
"""The phases of a job, until it finishes."""

LONGEST_STEP_SECONDS = 86400.0
"""Longer step times in an agent's report are ignored."""


@dataclass(slots=True)
class JobRecord:
    """The state of one job from which its metrics are computed."""

    uid: str
    status: ParallelTrainingJobStatus = field(default_factory=ParallelTrainingJobStatus)
    phase: str = ""
    since: float = 0.0
    wallclock: dict[str, float] = field(default_factory=dict)
    productive: float = 0.0
    furthest_step: int | None = None
    lost_steps: int = 0
    last_step: int | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    """The job's time by cause, of its whole life, up to `seconds_at`."""
    seconds_at: float = 0.0
    exported: dict[str, float] = field(default_factory=dict)
    """The largest value of each cause so far: a counter never goes back, also if a step is reported late."""
    oldest_report_at: float | None = None
    """When the oldest of its agents' last reports arrived. None while no worker runs in a mesh generation."""

    def put(
        self,
        status: ParallelTrainingJobStatus,
        progress: Progress | None,
        clock: float,
        oldest_report_age: float | None = None,
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        """Record the job's status, its latest progress, the age of its agents' oldest report and the seconds by cause
        at the time `clock`.
        """
        self.status = status
        self.seconds, self.seconds_at = seconds or {}, clock
        self.oldest_report_at = None if oldest_report_age is None else clock - oldest_report_age
        self._add_elapsed(clock)
        self.phase = phase_of(status)
        # The value comes from a user's pod: ignore it if it is out of range.
        if progress is None or not 0 <= progress.step <= MAX_SAFE_INTEGER:
            return
        step = progress.step
        step_seconds = progress.step_seconds if 0 <= progress.step_seconds <= LONGEST_STEP_SECONDS else 0.0
        if self.furthest_step is None:
            self.furthest_step = step
        if step > self.furthest_step:
            self.productive += (step - self.furthest_step) * step_seconds
            self.furthest_step = step
        if self.last_step is not None and step < self.last_step:
            self.lost_steps += self.last_step - step
        self.last_step = step

    def seconds_by_phase(self, clock: float) -> dict[str, float]:
        """Seconds by phase, up to the moment `clock`."""
        self._add_elapsed(clock)
        return dict(self.wallclock)

    def seconds_by_cause(self, clock: float) -> dict[str, float]:
        """Seconds by cause up to the moment `clock`; with steps, up to the last one that was reported."""
        found = dict(self.seconds)
        cause = self.status.goodput.cause if self.status.goodput is not None else ""
        if cause and cause not in STEPPING:
            found[cause] = found.get(cause, 0.0) + max(0.0, clock - self.seconds_at)
        return found

    def exported_seconds(self, clock: float) -> dict[str, float]:
        """The same for a counter."""
        for cause, seconds in self.seconds_by_cause(clock).items():
            self.exported[cause] = max(seconds, self.exported.get(cause, 0.0))
        return self.exported

    def oldest_report_age(self, clock: float) -> float | None:
        """Age of the oldest of its agents' last reports, at the time `clock`."""
        return None if self.oldest_report_at is None else max(0.0, clock - self.oldest_report_at)

    def _add_elapsed(self, clock: float) -> None:
        if self.phase:
            self.wallclock[self.phase] = self.wallclock.get(self.phase, 0.0) + clock - self.since
        self.since = clock


def phase_of(status: ParallelTrainingJobStatus) -> str:
    """The job's current phase; empty if it has finished, is being deleted, or is invalid and never started."""
    ready = find(status.conditions, names.READY)
    reason = ready.reason if ready is not None else ""
    started = status.mesh is not None and status.mesh.generation > 0
    if status.completion_time is not None or reason == "Terminating" or (reason == "InvalidSpec" and not started):
        return ""
    if reason in ("Suspended", "Suspending"):
        return "suspended"
    if reason == "AgentsSilent":
        return "unknown"
    # While an edit is blocked, the job is not ready although its ranks train.
    training, _, world = status.ready_ranks.partition("/")
    if training == world and world not in ("", "0"):
        return "training"
    if reason in ("", "Placing"):
        return "queued"
    return (
        "starting" if status.mesh is None or status.mesh.generation <= 1 and not status.restart_count else "restarting"
    )


Records = Sequence[tuple[JobKey, JobRecord]]


def job_metric(
    name: str, kind: Kind, text: str, *labels: Label, read: Callable[[JobRecord], Iterable[Sample]]
) -> Metric[Records]:
    """Declare a metric of every job. `read` computes one job's samples, without the labels that name the job."""

    def source(records: Records) -> Iterator[Sample]:
        for key, record in records:
            for values, value in read(record):
                yield (*key, *values), value

    return Metric(name, kind, text, (*JOB, *labels), source=source)


def one(value: float | None) -> Iterable[Sample]:
    """Return the sample of a metric without further labels; an empty list if the value is None."""
    return [] if value is None else [((), value)]


def number(text: str) -> float | None:
    """Return the number in a field of status; None if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return None


def _jobs(records: Records) -> Iterable[Sample]:
    counts = Counter((key.namespace, record.phase or "finished") for key, record in records)
    return counts.items()


def _degrees(record: JobRecord) -> Iterable[Sample]:
    plan = record.status.plan
    degrees = [str(plan.tensor), str(plan.pipeline), str(plan.data)] if plan is not None else ["", "", ""]
    return [((record.uid, *degrees), 1)]


def _ranks(record: JobRecord) -> Iterable[Sample]:
    training, _, total = record.status.ready_ranks.partition("/")
    if not (training.isdecimal() and total.isdecimal()):
        return []
    return [(("training",), int(training)), (("total",), int(total))]


def _placement_cost(record: JobRecord) -> Iterable[Sample]:
    placement = record.status.placement
    return one(number(placement.cost) if placement is not None else None)


def _straddling_groups(record: JobRecord) -> Iterable[Sample]:
    placement = record.status.placement
    if placement is None:
        return []
    return [(("tensor",), placement.straddling_tensor_groups), (("replica",), placement.straddling_replicas)]


def _seconds_by_phase(record: JobRecord) -> Iterable[Sample]:
    return [((phase,), seconds) for phase, seconds in record.seconds_by_phase(time.monotonic()).items()]


def _seconds_by_cause(record: JobRecord) -> Iterable[Sample]:
    seconds = record.exported_seconds(time.monotonic())
    return [((cause.value,), seconds[cause]) for cause in TimeCause if cause in seconds]


def _checkpoint(record: JobRecord) -> tuple[int, float] | None:
    """The step of the latest checkpoint, and its time in seconds since 1970."""
    checkpoint = record.status.checkpoint
    moment = parse_time(checkpoint.time) if checkpoint is not None else None
    return (checkpoint.step, moment.timestamp()) if checkpoint is not None and moment is not None else None


class JobMetrics(Catalog, Collector):
    """The metrics of all jobs."""

    jobs = Metric(
        "ptj_jobs",
        Kind.GAUGE,
        "Jobs, by state.",
        (NAMESPACE, Label("state", (*PHASES, "finished"))),
        source=_jobs,
    )
    info = job_metric(
        "ptj_job_info",
        Kind.GAUGE,
        "1 for every job.",
        Label("uid", meaning="the job's `metadata.uid`"),
        Label("tp", meaning="tensor degree; empty before there is a plan"),
        Label("pp", meaning="pipeline degree; empty before there is a plan"),
        Label("dp", meaning="data degree; empty before there is a plan"),
        read=_degrees,
    )
    condition = job_metric(
        "ptj_job_status_condition",
        Kind.GAUGE,
        "1 for the current status of each condition.",
        Label("type", meaning="as in `status.conditions`"),
        Label("status", ("True", "False", "Unknown")),
        read=lambda record: [((entry.type, entry.status), 1) for entry in record.status.conditions],
    )
    ranks = job_metric(
        "ptj_job_ranks",
        Kind.GAUGE,
        "Ranks of the job, by state.",
        Label("state", ("total", "training")),
        read=_ranks,
    )
    replicas = job_metric(
        "ptj_job_replicas",
        Kind.GAUGE,
        "Current number of replicas.",
        read=lambda record: one(plan.data if (plan := record.status.plan) is not None else None),
    )
    replicas_wanted = job_metric(
        "ptj_job_replicas_wanted",
        Kind.GAUGE,
        "Number of replicas with which an elastic job runs if there are enough nodes.",
        read=lambda record: one(elastic.wanted_replicas if (elastic := record.status.elastic) is not None else None),
    )
    restarts = job_metric(
        "ptj_job_restarts_total",
        Kind.COUNTER,
        "Restarts by cause.",
        Label("cause", meaning="as in `status.restarts`"),
        read=lambda record: [((entry.cause,), entry.count) for entry in record.status.restarts],
    )
    placement_cost = job_metric(
        "ptj_job_placement_cost",
        Kind.GAUGE,
        "Weighted crossings of NVLink domains, racks and zones by the job's groups.",
        read=_placement_cost,
    )
    straddling_groups = job_metric(
        "ptj_job_straddling_groups",
        Kind.GAUGE,
        "Tensor-parallel groups that leave their NVLink domain, and replicas whose pipeline leaves its rack, by kind.",
        Label("kind", ("tensor", "replica")),
        read=_straddling_groups,
    )
    wallclock_seconds = job_metric(
        "ptj_job_wallclock_seconds_total",
        Kind.COUNTER,
        "Time of the job by phase, since the operator started.",
        Label("phase", PHASES),
        read=_seconds_by_phase,
    )
    oldest_report_age_seconds = job_metric(
        "ptj_job_oldest_report_age_seconds",
        Kind.GAUGE,
        "Age of the last report of the agent that has been silent for the longest time, while a generation runs.",
        read=lambda record: one(record.oldest_report_age(time.monotonic())),
    )
    seconds_by_cause = job_metric(
        "ptj_job_seconds_total",
        Kind.COUNTER,
        "Time of the job by cause, since its creation, also under earlier operators.",
        Label("cause", tuple(cause.value for cause in TimeCause)),
        read=_seconds_by_cause,
    )
    goodput_ratio = job_metric(
        "ptj_job_goodput_ratio",
        Kind.GAUGE,
        "Time of steps that count, divided by all time in which the job was not suspended.",
        read=lambda record: one(goodput_ratio(record.seconds_by_cause(time.monotonic()))),
    )
    productive_seconds = job_metric(
        "ptj_job_productive_seconds_total",
        Kind.COUNTER,
        "Time spent on steps that were not repetitions.",
        read=lambda record: one(record.productive),
    )
    lost_steps = job_metric(
        "ptj_job_lost_steps_total",
        Kind.COUNTER,
        "Steps that were repeated after a restart.",
        read=lambda record: one(record.lost_steps),
    )
    step = job_metric(
        "ptj_job_step",
        Kind.GAUGE,
        "Last completed training step in the job's status.",
        read=lambda record: one(record.status.step),
    )
    mesh_generation = job_metric(
        "ptj_job_mesh_generation",
        Kind.GAUGE,
        "Number of the mesh generation.",
        read=lambda record: one(mesh.generation if (mesh := record.status.mesh) is not None else None),
    )
    last_checkpoint_step = job_metric(
        "ptj_job_last_checkpoint_step",
        Kind.GAUGE,
        "Step of the latest complete checkpoint.",
        read=lambda record: one(checkpoint[0] if (checkpoint := _checkpoint(record)) is not None else None),
    )
    last_checkpoint_time = job_metric(
        "ptj_job_last_checkpoint_timestamp_seconds",
        Kind.GAUGE,
        "Unix time of the latest complete checkpoint.",
        read=lambda record: one(checkpoint[1] if (checkpoint := _checkpoint(record)) is not None else None),
    )
    evaluation_step = job_metric(
        "ptj_job_evaluation_step",
        Kind.GAUGE,
        "Step of the latest evaluation in the job's status.",
        read=lambda record: one(evaluation.step if (evaluation := record.status.evaluation) is not None else None),
    )
    evaluation_loss = job_metric(
        "ptj_job_evaluation_loss",
        Kind.GAUGE,
        "Mean loss per token of the latest evaluation, on held-out documents.",
        read=lambda record: one(
            number(evaluation.loss) if (evaluation := record.status.evaluation) is not None else None
        ),
    )
    evaluation_perplexity = job_metric(
        "ptj_job_evaluation_perplexity",
        Kind.GAUGE,
        "Exponential of `ptj_job_evaluation_loss`.",
        read=lambda record: one(
            number(evaluation.perplexity) if (evaluation := record.status.evaluation) is not None else None
        ),
    )

    def __init__(self) -> None:
        self._records: dict[JobKey, JobRecord] = {}

    def record(self, key: JobKey, uid: str) -> JobRecord:
        """Return the record of this job; a new one if another job has taken its name."""
        known = self._records.get(key)
        if known is None or known.uid != uid:
            known = self._records[key] = JobRecord(uid, since=time.monotonic())
        return known

    def forget(self, key: JobKey) -> None:
        """Drop the job's series."""
        self._records.pop(key, None)

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """Compute every series from the records."""
        records = list(self._records.items())
        return [scraped(metric, records) for metric in self.metrics]
