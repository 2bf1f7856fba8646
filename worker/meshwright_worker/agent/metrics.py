"""Prometheus metrics of one worker pod. A metric has a series only if its value is measured.

Values of the entire job (loss, tokens, learning rate, expert loads) come only from the worker of rank 0, so that a sum
over pods counts them once. Values of a rank have the label `rank`, with at most as many values as the pod has GPUs.
When a new mesh generation moves ranks to other pods, their series are dropped here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from meshwright.metrics.declaration import Kind, Label, Metric, Sample
from meshwright.metrics.exporter import CounterMetric, Exporter, GaugeMetric, HistogramMetric, record
from meshwright.perplexity import perplexity
from meshwright.schedules.measured import MAX_SLOTS, RankTimeline
from meshwright_worker.rank.task import ExpertLoad, StepReport

# 10 ms to 10 minutes, four buckets per decade: for toy models on a CPU and for the largest models.
STEP_BUCKETS = tuple(round(10 ** (exponent / 4), 4) for exponent in range(-8, 12))
CHECKPOINT_BUCKETS = tuple(round(10 ** (exponent / 2), 3) for exponent in range(-2, 8))

JOB = (Label("namespace", meaning="the job's namespace"), Label("job_name", meaning="the job's name"))
RANK = Label("rank", meaning="the pod's ranks")
STAGE = Label("stage", meaning="the rank's coordinate in the pipeline, from 0 on")
PHASES = ("data", "compute", "communication", "update", "checkpoint", "other")
DIMENSIONS = ("tensor", "pipeline", "context", "expert", "data", "job")
MAX_PENDING = 64
"""Reports of a rank after which the series are updated, even if nobody reads them."""
LAYER = Label("layer", meaning="number of the mixture's layer")


def job_metric(name: str, kind: Kind, text: str, read: Callable[[StepReport], float | None]) -> Metric[StepReport]:
    """Declare a metric of the entire job, read from the steps of rank 0. None is no sample."""

    def source(report: StepReport) -> Iterable[Sample]:
        value = read(report)
        return [] if value is None else [((), value)]

    return Metric(name, kind, text, JOB, source=source)


def rank_metric(
    name: str, kind: Kind, text: str, read: Callable[[StepReport], float | None], buckets: tuple[float, ...] = ()
) -> Metric[StepReport]:
    """Declare a metric of every rank, read from its steps. None is no sample."""

    def source(report: StepReport) -> Iterable[Sample]:
        value = read(report)
        return [] if value is None else [((), value)]

    return Metric(name, kind, text, (*JOB, RANK), buckets, source=source)


def rank_part_metric(
    name: str, kind: Kind, text: str, label: Label, read: Callable[[StepReport], Iterable[tuple[str, float]]]
) -> Metric[StepReport]:
    """Declare a metric of every rank with one more label, whose values and the metric's `read` returns."""

    def source(report: StepReport) -> Iterable[Sample]:
        return [((value,), number) for value, number in read(report)]

    return Metric(name, kind, text, (*JOB, RANK, label), source=source)


def layer_metric(name: str, text: str, read: Callable[[ExpertLoad], float]) -> Metric[StepReport]:
    """Declare a gauge of every mixture-of-experts layer, read from the steps of rank 0."""

    def source(report: StepReport) -> Iterable[Sample]:
        return [((str(load.layer),), read(load)) for load in report.experts]

    return Metric(name, Kind.GAUGE, text, (*JOB, LAYER), source=source)


def _phases(report: StepReport) -> Iterable[tuple[str, float]]:
    """Divide the time of a step. What the clock does not see, such as reports, is `other`."""
    if report.times is None:
        return ()
    times, waits = report.times, sum(report.times.waits.values())
    other = report.seconds - report.data_seconds - times.compute - times.update - waits
    parts = (report.data_seconds, times.compute, waits, times.update, times.checkpoint, other)
    return [(name, max(0.0, seconds)) for name, seconds in zip(PHASES, parts, strict=True)]


def _measured_bubble(report: StepReport) -> Iterable[Sample]:
    bubble = report.times.bubble if report.times is not None else None
    return [] if bubble is None else [((), bubble)]


def _utilization(flops: float, report: StepReport) -> float | None:
    if report.peak_flops is None or report.seconds <= 0:
        return None
    return flops / (report.peak_flops * report.seconds)


def _samples(
    kind: Kind, source: Callable[[StepReport], Iterable[Sample]], reports: Sequence[StepReport]
) -> Iterable[Sample]:
    """The samples of several reports: of a counter the sums, of a gauge the latest of each series."""
    if kind is Kind.HISTOGRAM:
        return [sample for report in reports for sample in source(report)]
    found: dict[tuple[str, ...], float] = {}
    for report in reports:
        for labels, value in source(report):
            found[labels] = value + found.get(labels, 0.0) if kind is Kind.COUNTER else value
    return list(found.items())


class WorkerMetrics(Exporter):
    """The metrics of a worker pod. A metric with a source is read from the reports of completed steps."""

    mesh_generation = GaugeMetric("ptj_mesh_generation", "Mesh generation that this pod runs, or ran last.", *JOB)
    restarts = CounterMetric(
        "ptj_rank_restarts_total", "Rank processes that were started after this pod's first mesh generation.", *JOB
    )
    tokens = job_metric(
        "ptj_tokens_total",
        Kind.COUNTER,
        "Tokens that the job trained on while this pod ran rank 0.",
        lambda report: report.tokens,
    )
    model_flops = job_metric(
        "ptj_model_flops_total",
        Kind.COUNTER,
        "Floating-point operations of the job's steps: 6N + 12Lds per token.",
        lambda report: report.model_flops,
    )
    hardware_flops = job_metric(
        "ptj_hardware_flops_total",
        Kind.COUNTER,
        "`ptj_model_flops_total`, and the recomputation of activation checkpointing.",
        lambda report: report.hardware_flops,
    )
    mfu = job_metric(
        "ptj_mfu",
        Kind.GAUGE,
        "Model FLOPs of the last step over the dense bf16 peak of the GPUs, if that is known.",
        lambda report: _utilization(report.model_flops, report),
    )
    hfu = job_metric(
        "ptj_hfu",
        Kind.GAUGE,
        "`ptj_mfu` including recomputation.",
        lambda report: _utilization(report.hardware_flops, report),
    )
    loss = job_metric("ptj_loss", Kind.GAUGE, "Mean loss per token of the last step.", lambda report: report.loss)
    gradient_norm = job_metric(
        "ptj_grad_norm",
        Kind.GAUGE,
        "Global gradient norm of the last step, before clipping.",
        lambda report: report.gradient_norm,
    )
    learning_rate = job_metric(
        "ptj_learning_rate", Kind.GAUGE, "Learning rate of the last step.", lambda report: report.learning_rate
    )
    evaluation_loss = job_metric(
        "ptj_evaluation_loss",
        Kind.GAUGE,
        "Mean loss per token of the last evaluation, on held-out documents.",
        lambda report: report.evaluation_loss,
    )
    evaluation_perplexity = job_metric(
        "ptj_evaluation_perplexity",
        Kind.GAUGE,
        "Exponential of `ptj_evaluation_loss`.",
        lambda report: None if report.evaluation_loss is None else perplexity(report.evaluation_loss),
    )
    tracking_failures = job_metric(
        "ptj_tracking_failures_total",
        Kind.COUNTER,
        "Failures of experiment trackers: records that were not written.",
        lambda report: report.tracking_failures,
    )
    skipped_steps = job_metric(
        "ptj_skipped_steps_total",
        Kind.COUNTER,
        "Steps that updated nothing, because gradients overflowed fp16 or by `training.anomalies`, while this pod ran "
        "rank 0.",
        lambda report: report.skipped,
    )
    simulated_bubble = job_metric(
        "ptj_pipeline_bubble_simulated_ratio",
        Kind.GAUGE,
        "Part of a step in which a pipeline of equal stages waits, by simulation; for `Automatic` with measured times.",
        lambda report: report.simulated_bubble,
    )
    pipeline_bubble = job_metric(
        "ptj_pipeline_bubble_ratio",
        Kind.GAUGE,
        "Fraction of a step in which the ranks of the pipeline wait, from the times that `Automatic` measured.",
        lambda report: report.pipeline_bubble,
    )
    checkpoint_seconds = HistogramMetric(
        "ptj_checkpoint_duration_seconds",
        "Time to save a checkpoint until it is durable, or to load one.",
        CHECKPOINT_BUCKETS,
        *JOB,
        Label("op", ("save", "load")),
    )
    startup_seconds = GaugeMetric(
        "ptj_startup_phase_seconds",
        "Time of each phase of the last start.",
        *JOB,
        Label("phase", ("data", "rendezvous", "build", "load", "first-step")),
    )
    straggler = GaugeMetric(
        "ptj_rank_straggler_ratio",
        "Recent compute time of the rank over the median of all ranks of the job. Above 1, others wait for it. Stages "
        "of a pipeline differ by design.",
        *JOB,
        RANK,
        STAGE,
    )
    up = GaugeMetric("ptj_rank_up", "1 if the rank's process is running, else 0.", *JOB, RANK)
    completed_step = rank_metric("ptj_step", Kind.GAUGE, "Last completed training step.", lambda report: report.step)
    step_seconds = rank_metric(
        "ptj_step_duration_seconds",
        Kind.HISTOGRAM,
        "Time of a training step.",
        lambda report: report.seconds or None,
        STEP_BUCKETS,
    )
    data_wait_seconds = rank_metric(
        "ptj_data_wait_seconds_total",
        Kind.COUNTER,
        "Time that steps waited for data.",
        lambda report: report.data_seconds,
    )
    phase_seconds = rank_part_metric(
        "ptj_step_phase_seconds_total",
        Kind.COUNTER,
        "Time of the rank's steps by phase. The sum is that of the steps, and of the checkpoints between them.",
        Label("phase", PHASES),
        _phases,
    )
    exposed_seconds = rank_part_metric(
        "ptj_exposed_communication_seconds_total",
        Kind.COUNTER,
        "Time in which the rank waited for communication that no computation hid, by dimension of the mesh.",
        Label("dimension", DIMENSIONS, "`job`: all ranks, for the result of a step"),
        lambda report: report.times.waits.items() if report.times is not None else (),
    )
    measured_bubble = Metric(
        "ptj_pipeline_bubble_measured_ratio",
        Kind.GAUGE,
        "Part of the pipeline's time in the last step in which the rank waited for other stages.",
        (*JOB, RANK),
        source=_measured_bubble,
    )
    memory_peak = rank_part_metric(
        "ptj_memory_peak_bytes",
        Kind.GAUGE,
        "The most memory that the rank's process used: of the GPU by tensors or by torch's allocator, or of the host.",
        Label("kind", ("gpu_allocated", "gpu_reserved", "host")),
        lambda report: [(peak.kind, peak.bytes) for peak in report.memory],
    )
    expert_load_imbalance = layer_metric(
        "ptj_expert_load_imbalance",
        "Tokens of a mixture's busiest expert over the mean, in the last step.",
        lambda load: load.imbalance,
    )
    expert_dropped = layer_metric(
        "ptj_expert_dropped_ratio",
        "Fraction of a mixture's choices whose expert was full, in the last step.",
        lambda load: load.dropped,
    )
    auxiliary_loss = layer_metric(
        "ptj_auxiliary_loss",
        "Auxiliary loss of a mixture, without its weight: 1 if loads are even.",
        lambda load: load.auxiliary_loss,
    )
    router_z_loss = layer_metric(
        "ptj_router_z_loss", "Mean squared log-sum-exp of a router's logits.", lambda load: load.z_loss
    )

    def __init__(self, namespace: str, job: str) -> None:
        super().__init__()
        self._job = (namespace, job)
        self._ranks: set[str] = set()
        self._stages: Mapping[int, int] = {}
        self.timelines: dict[int, RankTimeline] = {}
        """The latest timed slots of local ranks."""
        self._pending: dict[int, list[StepReport]] = {}
        """Reports by rank that are not in the series yet."""

    def generation(
        self, number: int, ranks: Iterable[int], *, restart: bool, stages: Mapping[int, int] | None = None
    ) -> None:
        """Record the start of a generation with these local ranks; `restart` is False for the first one in this pod.

        `stages` has their stages of the pipeline.
        """
        self._apply()
        self._stages = stages or {}
        cls, now = type(self), {str(rank) for rank in ranks}
        for metric in self.metrics:
            if RANK not in metric.labels:
                continue
            for rank in self._ranks - now:
                self.exported(metric).remove_by_labels({RANK.name: rank})
            if metric.labels[-1] == RANK and metric not in (cls.straggler, cls.measured_bubble):
                for rank in now:
                    self.exported(metric).labels(*self._job, rank)
        self._ranks = now
        self.timelines.clear()
        for rank in now:
            self.up.labels(*self._job, rank).set(0)
        # A new generation measures again, if it has such a pipeline.
        for measured in (cls.pipeline_bubble, cls.simulated_bubble, cls.measured_bubble, cls.straggler):
            self.exported(measured).clear()
        if "0" not in now:
            self._clear_job_gauges()
        self.mesh_generation.labels(*self._job).set(number)
        self.restarts.labels(*self._job).inc(len(now) if restart else 0)

    def rank_up(self, rank: int, up: bool) -> None:
        """Record whether the process of `rank` is running."""
        self.up.labels(*self._job, str(rank)).set(1 if up else 0)

    def step(self, rank: int, report: StepReport) -> None:
        """Record a completed step of `rank`. The series change when they are read, or after `MAX_PENDING` steps."""
        if report.timeline is not None and len(report.timeline.slots) <= MAX_SLOTS:
            self.timelines[rank] = report.timeline
        pending = self._pending.setdefault(rank, [])
        pending.append(report)
        if len(pending) >= MAX_PENDING:
            self._apply()

    def exposition(self) -> bytes:
        """See `Exporter.exposition`."""
        self._apply()
        return super().exposition()

    def _apply(self) -> None:
        """Update the series with the pending reports.

        Steps of a small model take milliseconds, and scrapes are many seconds apart. So counters add up first, and a
        gauge is set once.
        """
        for rank, reports in self._pending.items():
            for metric in self.metrics:
                if metric.source is None:
                    continue
                of_every_rank = RANK in metric.labels
                if rank == 0 or of_every_rank:
                    names = (*self._job, str(rank)) if of_every_rank else self._job
                    samples = _samples(metric.kind, metric.source, reports)
                    if reports[-1].partial and not (metric.name == type(self).loss.name and reports[-1].has_loss):
                        samples = [(more, value) for more, value in samples if value and not math.isnan(value)]
                    record(self.exported(metric), (((*names, *more), value) for more, value in samples))
        self._pending.clear()

    def compute_times(self, seconds: Mapping[int, float | None], median: float | None) -> None:
        """Record the recent compute times of local ranks, and the median over all of the job's ranks, if known."""
        if median is None or median <= 0:
            self.straggler.clear()
            return
        for rank, own in seconds.items():
            if own is not None:
                self.straggler.labels(*self._job, str(rank), str(self._stages.get(rank, 0))).set(own / median)

    def _clear_job_gauges(self) -> None:
        """Remove the job's gauges, because rank 0 has moved to another pod. Counters keep their values."""
        for metric in self.metrics:
            if metric.kind is Kind.GAUGE and metric.source is not None and RANK not in metric.labels:
                self.exported(metric).clear()
        self.startup_seconds.clear()

    def checkpoint_saved(self, seconds: float) -> None:
        """Record a durable checkpoint."""
        self.checkpoint_seconds.labels(*self._job, "save").observe(seconds)

    def phase(self, rank: int, name: str, seconds: float) -> None:
        """Record a completed start-up phase of `rank`."""
        if rank != 0:
            return
        self.startup_seconds.labels(*self._job, name).set(seconds)
        if name == "load":
            self.checkpoint_seconds.labels(*self._job, "load").observe(seconds)
