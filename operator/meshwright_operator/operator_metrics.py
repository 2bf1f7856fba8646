"""Prometheus metrics of the operator itself. Labels have few values; metrics of jobs are in `job_metrics`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version

from meshwright.metrics.declaration import Label
from meshwright.metrics.exporter import CounterMetric, Exporter, GaugeMetric, HistogramMetric
from meshwright_operator.http.limits import CLOSE_REASONS

DURATION_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
STARTUP_BUCKETS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
WAIT_BUCKETS = (1, 10, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 24 * 3600, 72 * 3600)
COST_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

VERB = Label("verb", ("GET", "POST", "PUT", "PATCH", "DELETE"))
RESOURCE = Label("resource", meaning="plural name of the API resource")


class OperatorMetrics(Exporter):
    """The metrics of the operator process."""

    build_info = GaugeMetric("ptj_build_info", "Version of the operator.", Label("version", meaning="its version"))
    leader = GaugeMetric("ptj_leader", "1 if this process holds the Lease, else 0.")
    events = CounterMetric(
        "ptj_events_total",
        "Events about jobs, by result: posted, failed or dropped.",
        Label("result", ("posted", "failed", "dropped")),
    )
    coordinator_requests = CounterMetric(
        "ptj_coordinator_requests_total",
        "Requests of worker agents.",
        Label("endpoint", ("mesh", "report", "trust")),
        Label("code", meaning="HTTP status; 499 if the agent closed the connection"),
    )
    certificate_expiry = GaugeMetric(
        "ptj_coordinator_certificate_expiry_timestamp_seconds",
        "Unix time at which a certificate of the coordinator expires.",
        Label("certificate", ("serving", "authority")),
    )
    certificate_renewal_failures = CounterMetric(
        "ptj_coordinator_certificate_renewal_failures_total",
        "Failed renewals of the coordinator's certificate or CA. They are retried.",
    )
    closed_connections = CounterMetric(
        "ptj_http_connections_closed_total",
        "Connections that a server refused or closed to stay within its limits.",
        Label("server", ("coordinator", "health")),
        Label("reason", CLOSE_REASONS),
    )
    reconcile_seconds = HistogramMetric(
        "ptj_reconcile_duration_seconds",
        "Time of one reconcile of a job.",
        DURATION_BUCKETS,
        Label("result", ("ok", "stale", "error"), "`stale`: the job changed meanwhile; it is reconciled again at once"),
    )
    reconcile_errors = CounterMetric(
        "ptj_reconcile_errors_total",
        "Failed reconciles, by error type.",
        Label("reason", meaning="name of the exception's class"),
    )
    workqueue_depth = GaugeMetric("ptj_workqueue_depth", "Jobs in the work queue.")
    workqueue_wait_seconds = HistogramMetric(
        "ptj_workqueue_wait_seconds", "Time that a job spends in the work queue.", DURATION_BUCKETS
    )
    workqueue_retries = CounterMetric("ptj_workqueue_retries_total", "Failed reconciles that are retried.")
    api_requests = CounterMetric(
        "ptj_api_requests_total",
        "Requests to the API server, except watches.",
        VERB,
        RESOURCE,
        Label("code", meaning="HTTP status; 0 if the server could not be reached"),
    )
    api_request_seconds = HistogramMetric(
        "ptj_api_request_duration_seconds", "Time of one request to the API server.", DURATION_BUCKETS, VERB, RESOURCE
    )
    last_event = GaugeMetric(
        "ptj_watch_last_event_timestamp_seconds",
        "Unix time of the last event of a watch.",
        Label("resource", ("jobs", "pods", "nodes")),
    )
    last_contact = GaugeMetric(
        "ptj_watch_last_contact_timestamp_seconds",
        "Unix time of the last event, bookmark or new connection of a watch; the earliest of the watches of several "
        "namespaces.",
        Label("resource", ("paralleltrainingjobs", "pods", "nodes")),
    )
    last_resync = GaugeMetric(
        "ptj_resync_last_success_timestamp_seconds", "Unix time at which the last listing of all objects ended."
    )
    planning_seconds = HistogramMetric("ptj_planning_cpu_seconds", "CPU time of one plan.", DURATION_BUCKETS)
    planning_deadlines = CounterMetric(
        "ptj_planning_deadlines_exceeded_total", "Plans that were stopped because they took too much CPU time."
    )
    event_loop_stalls = HistogramMetric(
        "ptj_event_loop_stall_seconds",
        "Time for which the event loop did not run, if it was more than 50 ms.",
        DURATION_BUCKETS,
    )
    placement_seconds = HistogramMetric(
        "ptj_placement_duration_seconds",
        "Time to place one job.",
        DURATION_BUCKETS,
    )
    placement_attempts = CounterMetric(
        "ptj_placement_attempts_total", "Placements, by result.", Label("result", ("placed", "does_not_fit", "error"))
    )
    placement_cost = HistogramMetric(
        "ptj_placement_cost",
        "Cost of placements: milliseconds per step for network crossings, or a relative number if GPUs are unknown.",
        COST_BUCKETS,
    )
    policy_valid = GaugeMetric(
        "ptj_policy_valid",
        "1 if the administrator's policy, fabric and profiles are valid, 0 if one has an error and an earlier version "
        "is in effect.",
    )
    pod_operations = CounterMetric(
        "ptj_pod_operations_total",
        "Pods created, ungated and deleted.",
        Label("operation", ("create", "ungate", "delete")),
    )
    queue_wait_seconds = HistogramMetric(
        "ptj_queue_wait_seconds", "Time for which a job waited for nodes, each time that it got them.", WAIT_BUCKETS
    )
    startup_seconds = HistogramMetric(
        "ptj_job_startup_seconds", "Time from a job's creation until all of its ranks train.", STARTUP_BUCKETS
    )

    def __init__(self) -> None:
        super().__init__()
        self.build_info.labels(_version()).set(1)
        self.leader.set(0)
        self._invalid_documents: set[str] = set()
        self.before_scrape: list[Callable[[], Awaitable[None]]] = []
        """What is computed before the series are collected."""

    async def scrape(self) -> bytes:
        """See `Exporter.scrape`."""
        for refresh in self.before_scrape:
            await refresh()
        return await super().scrape()

    def valid_document(self, name: str) -> Callable[[bool], None]:
        """A function that records whether a document of the administrator is valid."""

        def report(valid: bool) -> None:
            (self._invalid_documents.discard if valid else self._invalid_documents.add)(name)
            self.policy_valid.set(int(not self._invalid_documents))

        return report

    def queue_depth(self, depth: Callable[[], int]) -> None:
        """Read the depth of the queue from `depth` at every scrape."""
        self.workqueue_depth.set_function(depth)

    def waited(self, seconds: float) -> None:
        """Record how long a job waited in the queue for its reconcile."""
        self.workqueue_wait_seconds.observe(seconds)

    def retried(self) -> None:
        """Record that a reconcile failed and will be repeated."""
        self.workqueue_retries.inc()


def _version() -> str:
    try:
        return version("meshwright")
    except PackageNotFoundError:
        return "unknown"
