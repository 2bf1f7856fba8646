"""Prometheus metrics of the operator itself: few label values, however many jobs. Jobs have their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
START_SECONDS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
COSTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class OperatorMetrics:
    """The operator's own series, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._process()
        self._reconciles()
        self._requests()
        self._placement()

    def exposition(self) -> bytes:
        """All series in Prometheus's text format."""
        return generate_latest(self.registry)

    def queue_depth(self, depth: Callable[[], int]) -> None:
        """Reads the depth of the queue from `depth` at every scrape."""
        self.workqueue_depth.set_function(depth)

    def waited(self, seconds: float) -> None:
        """As the queue's observer: a job waited this long for its reconcile."""
        self.workqueue_wait_seconds.observe(seconds)

    def retried(self) -> None:
        """As the queue's observer: a reconcile failed and will be repeated."""
        self.workqueue_retries.inc()

    def _process(self) -> None:
        self.build_info = self._gauge("ptj_build_info", "Version of the operator.", ["version"])
        self.build_info.labels(_version()).set(1)
        self.leader = self._gauge("ptj_leader", "Whether this process leads: 1 or 0.")
        self.leader.set(0)
        self.events = self._counter("ptj_events_total", "Events about jobs, by what became of them.", ["result"])
        self.coordinator_requests = self._counter(
            "ptj_coordinator_requests_total", "Requests of worker agents.", ["endpoint", "code"]
        )

    def _reconciles(self) -> None:
        self.reconcile_seconds = self._histogram(
            "ptj_reconcile_duration_seconds", "Time of one reconcile of a job.", SECONDS, ["result"]
        )
        self.reconcile_errors = self._counter(
            "ptj_reconcile_errors_total", "Reconciles that raised, by error.", ["reason"]
        )
        self.workqueue_depth = self._gauge("ptj_workqueue_depth", "Jobs that wait to be reconciled.")
        self.workqueue_wait_seconds = self._histogram(
            "ptj_workqueue_wait_seconds", "Time from a job's entry into the queue to its reconcile.", SECONDS
        )
        self.workqueue_retries = self._counter(
            "ptj_workqueue_retries_total", "Reconciles that will be repeated because they raised."
        )

    def _requests(self) -> None:
        self.api_requests = self._counter(
            "ptj_api_requests_total",
            "Requests to the API server, but for watches; code 0 when it could not be reached.",
            ["verb", "resource", "code"],
        )
        self.api_request_seconds = self._histogram(
            "ptj_api_request_duration_seconds",
            "Time of one request to the API server.",
            SECONDS,
            ["verb", "resource"],
        )
        self.last_event = self._gauge(
            "ptj_watch_last_event_timestamp_seconds", "When the last event of a watch arrived.", ["resource"]
        )
        self.last_contact = self._gauge(
            "ptj_watch_last_contact_timestamp_seconds",
            "When a watch last gave a sign of life: an event, a bookmark or a new connection.",
            ["resource"],
        )
        self.last_resync = self._gauge("ptj_resync_last_success_timestamp_seconds", "When the last full listing ended.")

    def _placement(self) -> None:
        self.placement_seconds = self._histogram(
            "ptj_placement_duration_seconds",
            "Time of one placement: counting what pods hold and choosing nodes.",
            SECONDS,
        )
        self.placement_attempts = self._counter("ptj_placement_attempts_total", "Placements, by result.", ["result"])
        self.placement_cost = self._histogram(
            "ptj_placement_cost",
            "What placements cost: milliseconds per step that network crossings add; relative where GPUs are unknown.",
            COSTS,
        )
        self.pod_operations = self._counter(
            "ptj_pod_operations_total", "Pods created, ungated and deleted.", ["operation"]
        )
        self.startup_seconds = self._histogram(
            "ptj_job_startup_seconds", "Time from a job's creation until all of its ranks train.", START_SECONDS
        )

    def _gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)


def _version() -> str:
    try:
        return version("meshwright")
    except PackageNotFoundError:
        return "unknown"
