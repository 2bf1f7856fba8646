"""Prometheus metrics of the operator itself: few label values, however many jobs. Jobs have their own."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)


class OperatorMetrics:
    """The operator's own series, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        self.build_info = Gauge("ptj_build_info", "Version of the operator.", ["version"], registry=self.registry)
        self.reconcile_seconds = Histogram(
            "ptj_reconcile_duration_seconds",
            "Time of one reconcile of a job.",
            ["result"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.reconcile_errors = Counter(
            "ptj_reconcile_errors_total", "Reconciles that raised, by error.", ["reason"], registry=self.registry
        )
        self.workqueue_depth = Gauge("ptj_workqueue_depth", "Jobs that wait to be reconciled.", registry=self.registry)
        self.api_requests = Counter(
            "ptj_api_requests_total",
            "Requests to the API server; code 0 when it could not be reached.",
            ["verb", "resource", "code"],
            registry=self.registry,
        )
        self.leader = Gauge("ptj_leader", "Whether this process leads: 1 or 0.", registry=self.registry)
        self.placement_seconds = Histogram(
            "ptj_placement_duration_seconds",
            "Time of one placement: listing pods and choosing nodes.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.placement_attempts = Counter(
            "ptj_placement_attempts_total", "Placements, by result.", ["result"], registry=self.registry
        )
        self.pod_operations = Counter(
            "ptj_pod_operations_total", "Pods created, ungated and deleted.", ["operation"], registry=self.registry
        )
        self.last_event = Gauge(
            "ptj_watch_last_event_timestamp_seconds",
            "When the last event of a watch arrived.",
            ["resource"],
            registry=self.registry,
        )
        self.last_resync = Gauge(
            "ptj_resync_last_success_timestamp_seconds", "When the last full listing ended.", registry=self.registry
        )
        self.coordinator_requests = Counter(
            "ptj_coordinator_requests_total", "Requests of worker agents.", ["endpoint", "code"], registry=self.registry
        )
        self.build_info.labels(_version()).set(1)
        self.leader.set(0)

    def exposition(self) -> bytes:
        """All series in Prometheus's text format."""
        return generate_latest(self.registry)


def _version() -> str:
    try:
        return version("meshwright")
    except PackageNotFoundError:
        return "unknown"
