"""Metrics of jobs, computed when they are scraped. The series of a deleted job disappear."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from meshwright.api.goodput import TimeCause
from meshwright.api.status import LimitKind
from meshwright.metrics.declaration import Catalog, Kind, Label, Metric, Sample
from meshwright.metrics.exporter import scraped
from meshwright_operator.decide.goodput import goodput_ratio
from meshwright_operator.decide.step_limit import COLLECTIVE_DIMENSIONS
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.metrics.job_record import PHASES, JobRecord, is_rejected
from meshwright_operator.timestamps import parse_time

NAMESPACE = Label("namespace", meaning="the job's namespace")
JOB = (NAMESPACE, Label("job_name", meaning="the job's name"))
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


def _step_limit(record: JobRecord) -> Iterable[Sample]:
    limit = record.status.limit
    if limit is None or record.phase != "training":
        return []
    return [((limit.kind.value, limit.dimension), limit.percent / 100)]


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


def _of_every_cause(seconds: Mapping[str, float]) -> Iterable[Sample]:
    """A sample of every cause, from the beginning: Prometheus counts no increase for the first value of a series.
    So a restart that is shorter than the interval of scrapes would not be seen.
    """
    return [((cause.value,), seconds.get(cause, 0.0)) for cause in TimeCause]


def _seconds_by_cause(record: JobRecord) -> Iterable[Sample]:
    return _of_every_cause(record.exported_seconds(time.monotonic()))


def _gpu_seconds(record: JobRecord) -> Iterable[Sample]:
    return _of_every_cause(record.exported_gpu_seconds(time.monotonic()))


def _checkpoint(record: JobRecord) -> tuple[int, float] | None:
    """The step of the latest checkpoint, and its time in seconds since 1970."""
    checkpoint = record.status.checkpoint
    moment = parse_time(checkpoint.time) if checkpoint is not None else None
    return (checkpoint.step, moment.timestamp()) if checkpoint is not None and moment is not None else None


def _queued_since(record: JobRecord) -> Iterable[Sample]:
    goodput = record.status.goodput
    waits = goodput is not None and goodput.cause == TimeCause.QUEUED and not is_rejected(record.status)
    moment = parse_time(goodput.since) if goodput is not None and waits else None
    return one(moment.timestamp() if moment is not None else None)


def _cost_bound(record: JobRecord) -> Iterable[Sample]:
    placement = record.status.placement
    cost, gap = (number(placement.cost), number(placement.gap)) if placement is not None else (None, None)
    return one(cost * (1 - gap) if cost is not None and gap is not None and 0 <= gap <= 1 else None)


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
    placement_cost_bound = job_metric(
        "ptj_job_placement_cost_lower_bound",
        Kind.GAUGE,
        "Cost that no placement on the same free nodes is below. No series with `spec.topology`, unless it is known.",
        read=_cost_bound,
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
    gpu_seconds = job_metric(
        "ptj_job_gpu_seconds_total",
        Kind.COUNTER,
        "Time of the job by cause for each GPU of its pods, since its creation, also under earlier operators.",
        Label("cause", tuple(cause.value for cause in TimeCause)),
        read=_gpu_seconds,
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
    queued_since = job_metric(
        "ptj_job_queued_timestamp_seconds",
        Kind.GAUGE,
        "Unix time since which the job has been waiting for nodes. No series while it does not wait.",
        read=_queued_since,
    )
    rescales = job_metric(
        "ptj_job_rescales_total",
        Kind.COUNTER,
        "Changes of an elastic job's number of ranks, by direction, since the operator started.",
        Label("direction", ("up", "down")),
        read=lambda record: (
            [((way,), record.rescales[way]) for way in ("up", "down")] if record.status.elastic is not None else []
        ),
    )
    tokens_per_second = job_metric(
        "ptj_job_tokens_per_second",
        Kind.GAUGE,
        "Recent throughput of the job.",
        read=lambda record: one(record.status.tokens_per_second),
    )
    mfu = job_metric(
        "ptj_job_mfu",
        Kind.GAUGE,
        "Model FLOPs of recent steps over the dense bf16 peak of the GPUs, if that is known.",
        read=lambda record: one(record.mfu()),
    )
    straggler = job_metric(
        "ptj_job_straggler_ratio",
        Kind.GAUGE,
        "Recent compute time of the slowest rank over the median of all ranks. No series with fewer than 3 ranks.",
        read=lambda record: one(record.compute.ratio if record.compute is not None else None),
    )
    step_limit = job_metric(
        "ptj_job_step_limit_ratio",
        Kind.GAUGE,
        "Part of a recent step that what limits it takes, as in `status.limit`. One series, while the job trains.",
        Label("limit", tuple(kind.value for kind in LimitKind)),
        Label("dimension", ("", *COLLECTIVE_DIMENSIONS), "with `Communication`"),
        read=_step_limit,
    )
    slowest_rank = job_metric(
        "ptj_job_slowest_rank",
        Kind.GAUGE,
        "Number of that rank.",
        read=lambda record: one(record.compute.slowest_rank if record.compute is not None else None),
    )
    loss = job_metric(
        "ptj_job_loss",
        Kind.GAUGE,
        "Mean loss per token of the last step in the job's status.",
        read=lambda record: one(number(record.status.loss)),
    )
    eta = job_metric(
        "ptj_job_eta_seconds",
        Kind.GAUGE,
        "Estimated time to the last step, at the recent step time.",
        read=lambda record: one(record.status.eta_seconds),
    )
    target_steps = job_metric(
        "ptj_job_target_steps",
        Kind.GAUGE,
        "Number of steps of the run.",
        read=lambda record: one(record.status.total_steps),
    )
    checkpoint_interval_steps = job_metric(
        "ptj_job_checkpoint_interval_steps",
        Kind.GAUGE,
        "Steps between checkpoints.",
        read=lambda record: one(record.checkpoint_steps),
    )
    checkpoint_interval_seconds = job_metric(
        "ptj_job_checkpoint_interval_seconds",
        Kind.GAUGE,
        "Time between checkpoints at the recent step time. No series before the first step.",
        read=lambda record: one(record.checkpoint_interval()),
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
    resumed_from_step = job_metric(
        "ptj_job_resumed_from_step",
        Kind.GAUGE,
        "Step of the other run's checkpoint from which the job began (`checkpoint.resumeFrom`). No series without one.",
        read=lambda record: one(began.step if (began := record.status.resumed_from) is not None else None),
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

    namespace_gpu_seconds = Metric[Records](
        "ptj_namespace_gpu_seconds_total",
        Kind.COUNTER,
        "GPU time of a namespace's jobs by cause, also of jobs that are gone, since the operator started to lead.",
        (NAMESPACE, Label("cause", tuple(cause.value for cause in TimeCause))),
    )

    def __init__(self) -> None:
        self._records: dict[JobKey, JobRecord] = {}
        self._gone: dict[str, Counter[str]] = {}
        """Namespace -> GPU seconds by cause of jobs that are gone, as far as this process has seen them pass."""

    def record(self, key: JobKey, uid: str) -> JobRecord:
        """Return the record of this job; a new one if another job has taken its name."""
        known = self._records.get(key)
        if known is None or known.uid != uid:
            self.forget(key)
            known = self._records[key] = JobRecord(uid, since=time.monotonic())
        return known

    def forget(self, key: JobKey) -> None:
        """Drop the job's series."""
        record = self._records.pop(key, None)
        if record is not None and (seen := record.gpu_seconds_seen(time.monotonic())):
            self._gone.setdefault(key.namespace, Counter()).update(seen)

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """Compute every series from the records, metric by metric: a scrape may do other things in between."""
        records = list(self._records.items())
        for metric in self.metrics:
            if metric.source is not None:
                yield scraped(metric, records)
        spent = replace(type(self).namespace_gpu_seconds, source=self._gpu_seconds_by_namespace)
        yield scraped(spent, records)

    def _gpu_seconds_by_namespace(self, records: Records) -> Iterable[Sample]:
        totals = {namespace: Counter(spent) for namespace, spent in self._gone.items()}
        for key, record in records:
            totals.setdefault(key.namespace, Counter()).update(record.gpu_seconds_seen(time.monotonic()))
        for namespace, spent in totals.items():
            for labels, seconds in _of_every_cause(spent):
                yield (namespace, *labels), seconds
