"""Prometheus metrics of one worker pod. A metric has a series only if its value is measured.

Values of the entire job (loss, tokens, learning rate, expert loads) come only from the worker of rank 0, so that a sum
over pods counts them once. Values of a rank have the label `rank`, with at most as many values as the pod has GPUs.
When a new mesh generation moves ranks to other pods, their series are dropped here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from meshwright.perplexity import perplexity
from meshwright_worker.rank.task import ExpertLoad, StepReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# 10 ms to 10 minutes, four buckets per decade: for toy models on a CPU and for the largest models.
STEP_BUCKETS = tuple(round(10 ** (exponent / 4), 4) for exponent in range(-8, 12))
JOB_LABELS = ("namespace", "job_name")
CHECKPOINT_BUCKETS = tuple(round(10 ** (exponent / 2), 3) for exponent in range(-2, 8))


class TrainerMetrics:
    """The metrics and the two labels that identify their job."""

    def __init__(self, namespace: str, job: str) -> None:
        self.registry = CollectorRegistry()
        self._names = (namespace, job)
        self._ranks: set[str] = set()
        self._expert_layers: set[str] = set()
        self._define_job_metrics()
        self._define_rank_metrics()
        self._define_expert_metrics()

    def _define_job_metrics(self) -> None:
        self._generation = self._gauge("ptj_mesh_generation", "Mesh generation this pod runs or ran last.")
        self._restarts = self._counter(
            "ptj_rank_restarts_total", "Rank processes started after this pod's first generation."
        )
        self._tokens = self._counter("ptj_tokens_total", "Tokens trained on by the job while this pod held rank 0.")
        self._model_flops = self._counter(
            "ptj_model_flops_total", "Floating-point operations of the job's steps, 6N + 12Lds a token."
        )
        self._hardware_flops = self._counter(
            "ptj_hardware_flops_total", "`ptj_model_flops_total` and what activation checkpointing computed again."
        )
        self._mfu = self._gauge(
            "ptj_mfu", "Model FLOPs of the last step over the GPUs' dense bf16 peak; on known GPUs."
        )
        self._hfu = self._gauge("ptj_hfu", "`ptj_mfu` with what was computed again.")
        self._loss = self._gauge("ptj_loss", "Mean loss per token of the last step.")
        self._gradient_norm = self._gauge("ptj_grad_norm", "Global gradient norm of the last step, before clipping.")
        self._learning_rate = self._gauge("ptj_learning_rate", "Learning rate of the last step.")
        self._evaluation_loss = self._gauge(
            "ptj_evaluation_loss", "Mean loss per token of the last evaluation on documents that are not trained on."
        )
        self._perplexity = self._gauge("ptj_evaluation_perplexity", "Exponential of `ptj_evaluation_loss`.")
        self._bubble = self._gauge(
            "ptj_pipeline_bubble_ratio",
            "Part of a step's passes in which the pipeline's ranks wait, by the times that `Automatic` measured.",
        )
        self._checkpoint = self._histogram(
            "ptj_checkpoint_duration_seconds",
            "Time to make a checkpoint durable (save) or to restore one (load).",
            CHECKPOINT_BUCKETS,
            "op",
        )
        self._phase = self._gauge("ptj_startup_phase_seconds", "Time of each phase of the last start.", "phase")

    def _define_rank_metrics(self) -> None:
        self._rank_up = self._gauge("ptj_rank_up", "Whether the rank's process lives.", "rank")
        self._step = self._gauge("ptj_step", "Last finished optimizer step.", "rank")
        self._seconds = self._histogram("ptj_step_duration_seconds", "Time of an optimizer step.", STEP_BUCKETS, "rank")
        self._data_wait = self._counter("ptj_data_wait_seconds_total", "Time steps waited for data.", "rank")

    def _define_expert_metrics(self) -> None:
        self._imbalance = self._gauge(
            "ptj_expert_load_imbalance",
            "Tokens of a mixture's busiest expert over the mean, in the last step.",
            "layer",
        )
        self._dropped = self._gauge(
            "ptj_expert_dropped_ratio", "Part of a mixture's choices whose expert was full, in the last step.", "layer"
        )
        self._auxiliary = self._gauge(
            "ptj_auxiliary_loss", "A mixture's auxiliary loss; 1 when loads are even.", "layer"
        )
        self._z_loss = self._gauge("ptj_router_z_loss", "Mean squared log-sum-exp of a router's logits.", "layer")

    def _gauge(self, name: str, text: str, *more: str) -> Gauge:
        return Gauge(name, text, [*JOB_LABELS, *more], registry=self.registry)

    def _counter(self, name: str, text: str, *more: str) -> Counter:
        return Counter(name, text, [*JOB_LABELS, *more], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *more: str) -> Histogram:
        return Histogram(name, text, [*JOB_LABELS, *more], buckets=buckets, registry=self.registry)

    def generation(self, number: int, ranks: Iterable[int], *, restart: bool) -> None:
        """Record the start of a generation with these local ranks; `restart` is False for the first one in this pod."""
        now = {str(rank) for rank in ranks}
        for rank in self._ranks - now:
            for metric in (self._rank_up, self._step, self._seconds, self._data_wait):
                metric.remove(*self._names, rank)
        for rank in now:
            self._rank_up.labels(*self._names, rank).set(0)
            self._step.labels(*self._names, rank)
            self._seconds.labels(*self._names, rank)
            self._data_wait.labels(*self._names, rank)
        self._ranks = now
        # A new generation measures again, if it has such a pipeline.
        self._bubble.clear()
        if "0" not in now:
            self._remove_expert_series()
            self._clear_job_gauges()
        self._generation.labels(*self._names).set(number)
        self._restarts.labels(*self._names).inc(len(now) if restart else 0)

    def rank_up(self, rank: int, up: bool) -> None:
        """Record whether the process of `rank` is running."""
        self._rank_up.labels(*self._names, str(rank)).set(1 if up else 0)

    def step(self, rank: int, report: StepReport) -> None:
        """Record a completed step of `rank`."""
        self._step.labels(*self._names, str(rank)).set(report.step)
        self._seconds.labels(*self._names, str(rank)).observe(report.seconds)
        self._data_wait.labels(*self._names, str(rank)).inc(report.data_seconds)
        if rank == 0:
            self._tokens.labels(*self._names).inc(report.tokens)
            self._loss.labels(*self._names).set(report.loss)
            self._gradient_norm.labels(*self._names).set(report.gradient_norm)
            self._learning_rate.labels(*self._names).set(report.learning_rate)
            self._count_flops(report)
            if report.evaluation_loss is not None:
                self._evaluation_loss.labels(*self._names).set(report.evaluation_loss)
                self._perplexity.labels(*self._names).set(perplexity(report.evaluation_loss))
            if report.pipeline_bubble is not None:
                self._bubble.labels(*self._names).set(report.pipeline_bubble)
            for load in report.experts:
                self._set_expert_load(load)

    def _count_flops(self, report: StepReport) -> None:
        self._model_flops.labels(*self._names).inc(report.model_flops)
        self._hardware_flops.labels(*self._names).inc(report.hardware_flops)
        if report.peak_flops is not None and report.seconds > 0:
            possible = report.peak_flops * report.seconds
            self._mfu.labels(*self._names).set(report.model_flops / possible)
            self._hfu.labels(*self._names).set(report.hardware_flops / possible)

    def _set_expert_load(self, load: ExpertLoad) -> None:
        names = (*self._names, str(load.layer))
        self._expert_layers.add(str(load.layer))
        self._imbalance.labels(*names).set(load.imbalance)
        self._dropped.labels(*names).set(load.dropped)
        self._auxiliary.labels(*names).set(load.auxiliary_loss)
        self._z_loss.labels(*names).set(load.z_loss)

    def _clear_job_gauges(self) -> None:
        """Remove the job's gauges, because rank 0 has moved to another pod. Counters keep their values."""
        whole = (self._mfu, self._hfu, self._loss, self._gradient_norm, self._learning_rate)
        for gauge in (*whole, self._evaluation_loss, self._perplexity, self._phase):
            gauge.clear()

    def _remove_expert_series(self) -> None:
        for layer in self._expert_layers:
            for metric in (self._imbalance, self._dropped, self._auxiliary, self._z_loss):
                metric.remove(*self._names, layer)
        self._expert_layers = set()

    def checkpoint_saved(self, seconds: float) -> None:
        """Record a durable checkpoint."""
        self._checkpoint.labels(*self._names, "save").observe(seconds)

    def phase(self, rank: int, name: str, seconds: float) -> None:
        """Record a completed start-up phase of `rank`."""
        if rank != 0:
            return
        self._phase.labels(*self._names, name).set(seconds)
        if name == "load":
            self._checkpoint.labels(*self._names, "load").observe(seconds)

    def render(self) -> bytes:
        """Return the metrics in Prometheus text format."""
        return generate_latest(self.registry)
