"""The Operator board: leadership, reconciles, requests to the API server, watches, placement and the coordinator."""

from __future__ import annotations

from typing import Any

from dashboards.source.board import OPERATOR_UID, Row, build, query_variable
from dashboards.source.panels import (
    GREEN,
    ORANGE,
    RED,
    Column,
    Query,
    Step,
    histogram_over_time,
    joined_table,
    single_stat,
    state_timeline,
    time_series,
)
from dashboards.source.queries import CLUSTER, OPERATOR, RATE, or_zero, quantile, rate

BUILD = f"ptj_build_info{{{OPERATOR}}}"
DAY = 86400


def board() -> dict[str, Any]:
    """Return the JSON of the board."""
    return build(
        uid=OPERATOR_UID,
        title="Meshwright / Operator",
        description="The operator: leadership, reconciles, API requests, watches, planning and the coordinator.",
        variables=[
            query_variable(
                "instance",
                "Process",
                "Processes of the operator, by their address.",
                f"label_values(ptj_build_info{{{CLUSTER}}}, instance)",
                several=True,
            )
        ],
        rows=[_leadership(), _reconciles(), _api(), _watches(), _planning(), _coordinator(), _process()],
    )


def _leadership() -> Row:
    return Row(
        "Is it running?",
        [
            single_stat(
                "Processes",
                "Operator processes that Prometheus scrapes.",
                "short",
                Query(f"count({BUILD})", "processes"),
                steps=[Step(1, GREEN)],
                base=RED,
            ),
            single_stat(
                "Leaders",
                "Processes that hold the Lease. It must be 1 in each cluster.",
                "short",
                Query(f"sum(ptj_leader{{{OPERATOR}}})", "leaders"),
                steps=[Step(1, GREEN), Step(2, RED)],
                base=RED,
            ),
            single_stat(
                "Policy",
                "Whether the administrator's policy is valid. If it has an error, an earlier version is in effect.",
                "bool_yes_no",
                Query(f"min(ptj_policy_valid{{{OPERATOR}}})", "valid"),
                steps=[Step(1, GREEN)],
                base=RED,
            ),
            joined_table(
                "Versions",
                "Version of each process.",
                [f"max by (instance, version) ({BUILD})"],
                [Column("instance", "process"), Column("version", "version")],
                span=12,
                height=4,
            ),
            state_timeline(
                "Leadership",
                "Which process holds the Lease.",
                Query(f"max by (instance) (ptj_leader{{{OPERATOR}}})", "{{instance}}"),
                states={"1": ("leads", "green"), "0": ("on standby", "text")},
                height=5,
            ),
        ],
    )


def _reconciles() -> Row:
    return Row(
        "Reconciles",
        [
            time_series(
                "Reconciles by result",
                "Reconciles per second. A stale one is repeated at once, because the job changed meanwhile.",
                "cps",
                Query(rate("ptj_reconcile_duration_seconds_count", OPERATOR, "result"), "{{result}}"),
                span=8,
                stacked=True,
                colors={"ok": GREEN, "stale": ORANGE, "error": RED},
            ),
            time_series(
                "Errors by type",
                "Failed reconciles per second, by the type of the error.",
                "cps",
                Query(or_zero(rate("ptj_reconcile_errors_total", OPERATOR, "reason"), "reason", BUILD), "{{reason}}"),
                span=8,
            ),
            time_series(
                "Reconcile time",
                "Time of one reconcile of a job.",
                "s",
                Query(quantile(0.5, "ptj_reconcile_duration_seconds", OPERATOR), "p50"),
                Query(quantile(0.99, "ptj_reconcile_duration_seconds", OPERATOR), "p99"),
                span=8,
            ),
            histogram_over_time(
                "Distribution of the reconcile time",
                "Reconciles per interval, by their time.",
                "s",
                f"sum by (le) (increase(ptj_reconcile_duration_seconds_bucket{{{OPERATOR}}}[{RATE}]))",
            ),
            time_series(
                "Work queue",
                "Jobs in the work queue, and retries per second.",
                "short",
                Query(f"sum(ptj_workqueue_depth{{{OPERATOR}}})", "depth"),
                Query(rate("ptj_workqueue_retries_total", OPERATOR), "retries per second"),
                span=6,
            ),
            time_series(
                "Wait in the work queue",
                "Time that a job waits in the work queue for its reconcile.",
                "s",
                Query(quantile(0.5, "ptj_workqueue_wait_seconds", OPERATOR), "p50"),
                Query(quantile(0.99, "ptj_workqueue_wait_seconds", OPERATOR), "p99"),
                span=6,
            ),
        ],
    )


def _api() -> Row:
    return Row(
        "Requests to the API server",
        [
            time_series(
                "Requests by verb and resource",
                "Requests per second, except watches.",
                "reqps",
                Query(rate("ptj_api_requests_total", OPERATOR, "verb", "resource"), "{{verb}} {{resource}}"),
                span=8,
                stacked=True,
            ),
            time_series(
                "Requests by status",
                "Requests per second by HTTP status. 0: the server could not be reached.",
                "reqps",
                Query(rate("ptj_api_requests_total", OPERATOR, "code"), "{{code}}"),
                span=8,
            ),
            time_series(
                "Request time, p99",
                "99th percentile of the time of one request, by verb.",
                "s",
                Query(quantile(0.99, "ptj_api_request_duration_seconds", OPERATOR, "verb"), "{{verb}}"),
                span=8,
            ),
        ],
    )


def _watches() -> Row:
    return Row(
        "Watches",
        [
            time_series(
                "Time since the last contact",
                "Time since the last event, bookmark or new connection of each watch: 0 about once a minute.",
                "s",
                Query(
                    f"time() - max by (instance, resource) (ptj_watch_last_contact_timestamp_seconds{{{OPERATOR}}})",
                    "{{resource}} {{instance}}",
                ),
                span=8,
            ),
            time_series(
                "Time since the last event",
                "Time since the last event of each watch.",
                "s",
                Query(
                    f"time() - max by (instance, resource) (ptj_watch_last_event_timestamp_seconds{{{OPERATOR}}})",
                    "{{resource}} {{instance}}",
                ),
                span=8,
            ),
            time_series(
                "Time since the last listing",
                "Time since the operator last listed all objects.",
                "s",
                Query(
                    f"time() - max by (instance) (ptj_resync_last_success_timestamp_seconds{{{OPERATOR}}} > 0)",
                    "{{instance}}",
                ),
                span=8,
            ),
        ],
    )


def _planning() -> Row:
    return Row(
        "Planning and placement",
        [
            time_series(
                "CPU time of plans",
                "CPU time of one plan.",
                "s",
                Query(quantile(0.5, "ptj_planning_cpu_seconds", OPERATOR), "p50"),
                Query(quantile(0.99, "ptj_planning_cpu_seconds", OPERATOR), "p99"),
                span=5,
            ),
            single_stat(
                "Plans stopped",
                "Plans that were stopped since the operator started, because they took too much CPU time.",
                "short",
                Query(f"sum(ptj_planning_deadlines_exceeded_total{{{OPERATOR}}})", "stopped"),
                steps=[Step(1, ORANGE)],
                base=GREEN,
                height=8,
            ),
            time_series(
                "Placement time",
                "Time to place one job.",
                "s",
                Query(quantile(0.5, "ptj_placement_duration_seconds", OPERATOR), "p50"),
                Query(quantile(0.99, "ptj_placement_duration_seconds", OPERATOR), "p99"),
                span=5,
            ),
            time_series(
                "Placements by result",
                "Attempts to place a job, by result.",
                "cps",
                Query(or_zero(rate("ptj_placement_attempts_total", OPERATOR, "result"), "result", BUILD), "{{result}}"),
                span=5,
            ),
            time_series(
                "Pods",
                "Pods created, ungated and deleted, per second.",
                "cps",
                Query(
                    or_zero(rate("ptj_pod_operations_total", OPERATOR, "operation"), "operation", BUILD),
                    "{{operation}}",
                ),
                span=5,
            ),
        ],
    )


def _coordinator() -> Row:
    expiry = f"min by (certificate) (ptj_coordinator_certificate_expiry_timestamp_seconds{{{OPERATOR}}})"
    return Row(
        "Coordinator",
        [
            time_series(
                "Requests of agents",
                "Requests of worker agents per second, by endpoint and status.",
                "reqps",
                Query(rate("ptj_coordinator_requests_total", OPERATOR, "endpoint", "code"), "{{endpoint}} {{code}}"),
                span=8,
            ),
            time_series(
                "Closed connections",
                "Connections per second that a server refused or closed to stay within its limits.",
                "cps",
                Query(
                    or_zero(rate("ptj_http_connections_closed_total", OPERATOR, "reason"), "reason", BUILD),
                    "{{reason}}",
                ),
                span=8,
            ),
            time_series(
                "Certificates",
                "Time until the coordinator's certificates expire. They are renewed before.",
                "s",
                Query(f"{expiry} - time()", "{{certificate}}"),
                span=4,
            ),
            single_stat(
                "Failed renewals of certificates",
                "Renewals that failed since the operator started. They are retried.",
                "short",
                Query(f"sum(ptj_coordinator_certificate_renewal_failures_total{{{OPERATOR}}})", "failed"),
                steps=[Step(1, RED)],
                base=GREEN,
                height=8,
            ),
        ],
    )


def _process() -> Row:
    return Row(
        "Process",
        [
            time_series(
                "Stalls of the event loop",
                "Share of the time in which the event loop did not run, counting stalls of more than 50 ms.",
                "percentunit",
                Query(rate("ptj_event_loop_stall_seconds_sum", OPERATOR, "instance"), "{{instance}}"),
            ),
            time_series(
                "Events about jobs",
                "Kubernetes events per second, by result.",
                "cps",
                Query(or_zero(rate("ptj_events_total", OPERATOR, "result"), "result", BUILD), "{{result}}"),
            ),
        ],
    )
