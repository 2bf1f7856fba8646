"""The Fleet board: all jobs, what waits and for how long, and where the GPU hours go."""

from __future__ import annotations

from typing import Any

from dashboards.source.board import FLEET_UID, JOB_LINK, JOB_LINK_OF_SERIES, Row, build, query_variable
from dashboards.source.panels import (
    CAUSE_COLORS,
    GREEN,
    ORANGE,
    RED,
    Column,
    Query,
    Step,
    bars,
    joined_table,
    single_stat,
    time_series,
)
from dashboards.source.queries import (
    BY_JOB,
    CLUSTER,
    HOLDS_NO_GPU,
    JOBS,
    SAME_JOB,
    conditions,
    or_zero,
    rate,
)

BUILD = f"ptj_build_info{{{CLUSTER}}}"
STATE_COLORS = {
    "training": GREEN,
    "queued": "light-blue",
    "starting": "blue",
    "restarting": RED,
    "unknown": ORANGE,
    "suspended": "#7f7f7f",
    "finished": "text",
}


def board() -> dict[str, Any]:
    """Return the JSON of the board."""
    return build(
        uid=FLEET_UID,
        title="Meshwright / Fleet",
        description="All ParallelTrainingJobs: what trains, what waits, and where the GPU hours go.",
        variables=[
            query_variable(
                "namespace",
                "Namespace",
                "Namespaces of the jobs.",
                f"label_values(ptj_job_info{{{CLUSTER}}}, namespace)",
                several=True,
            )
        ],
        rows=[_jobs(), _queue(), _capacity(), _goodput(), _restarts(), _operator(), _list()],
    )


def _count(kind: str) -> str:
    """The number of jobs of which a condition is True; 0 if there are jobs, and none is like that."""
    condition = conditions(f'{JOBS},type="{kind}",status="True"')
    return f"count({condition} == 1) or 0 * sum(ptj_jobs{{{JOBS}}})"


def _jobs() -> Row:
    training = f'sum(ptj_job_ranks{{{JOBS},state="training"}})'
    return Row(
        "Jobs",
        [
            single_stat(
                "Jobs by state",
                "Number of jobs in each state.",
                "short",
                Query(f"sum by (state) (ptj_jobs{{{JOBS}}})", "{{state}}"),
                span=12,
                names=True,
            ),
            single_stat(
                "GPUs that train",
                "Ranks that train. Each rank has one GPU.",
                "short",
                Query(training, "ranks"),
            ),
            single_stat(
                "Stalled jobs",
                "Jobs that cannot go on before somebody changes them, by the condition Stalled.",
                "short",
                Query(_count("Stalled"), "jobs"),
                steps=[Step(1, ORANGE)],
                base=GREEN,
            ),
            single_stat(
                "Failed jobs",
                "Jobs that have failed, and that still exist.",
                "short",
                Query(_count("Failed"), "jobs"),
                steps=[Step(1, RED)],
                base=GREEN,
            ),
            time_series(
                "Jobs by state over time",
                "Number of jobs in each state.",
                "short",
                Query(f"sum by (state) (ptj_jobs{{{JOBS}}})", "{{state}}"),
                stacked=True,
                colors=STATE_COLORS,
            ),
            time_series(
                "GPUs that train, by namespace",
                "Ranks that train, by namespace. Each rank has one GPU.",
                "short",
                Query(f'sum by (namespace) (ptj_job_ranks{{{JOBS},state="training"}})', "{{namespace}}"),
                stacked=True,
            ),
        ],
    )


def _queue() -> Row:
    waiting = f"sort_desc(topk(10, time() - max {BY_JOB} (ptj_job_queued_timestamp_seconds{{{JOBS}}})))"
    nobody = f'label_replace(0 * max(ptj_jobs{{{JOBS}}}), "job_name", "no job waits", "", "")'
    return Row(
        "Queue",
        [
            bars(
                "Longest waits",
                "Time for which jobs have been waiting for nodes.",
                "s",
                Query(f"{waiting} or on () {nobody}", "{{namespace}} {{job_name}}", instant=True),
                link=JOB_LINK_OF_SERIES,
                span=8,
            ),
            time_series(
                "Wait for nodes",
                "Time for which jobs waited for nodes, each time that they got them, in the hour before.",
                "s",
                Query(_wait(0.5), "p50"),
                Query(_wait(0.99), "p99"),
                span=8,
            ),
            time_series(
                "Placements",
                "Attempts to place a job, by result.",
                "cps",
                Query(or_zero(rate("ptj_placement_attempts_total", CLUSTER, "result"), "result", BUILD), "{{result}}"),
                span=8,
            ),
        ],
    )


def _wait(share: float) -> str:
    """A quantile of the waits of the last hour: gangs get nodes too seldom for a shorter window."""
    return f"histogram_quantile({share}, sum by (le) (increase(ptj_queue_wait_seconds_bucket{{{CLUSTER}}}[1h])))"


def _capacity() -> Row:
    return Row(
        "GPUs",
        [
            time_series(
                "GPUs by state",
                "GPUs of all nodes: free, allocated to pods, or free on a node that accepts no pods.",
                "short",
                Query(f"max by (resource, state) (ptj_gpus{{{CLUSTER}}})", "{{state}} {{resource}}"),
                stacked=True,
                span=8,
            ),
            time_series(
                "Largest free block",
                "The most free GPUs in one location of each level. A job whose groups need more in one location waits.",
                "short",
                Query(f"max by (resource, level) (ptj_gpus_largest_free{{{CLUSTER}}})", "{{level}} {{resource}}"),
                span=8,
            ),
            time_series(
                "Fragmentation",
                "Part of the free GPUs in locations of a level in which other GPUs are allocated.",
                "percentunit",
                Query(f"max by (resource, level) (ptj_gpu_fragmentation_ratio{{{CLUSTER}}})", "{{level}} {{resource}}"),
                maximum=1,
                span=8,
            ),
        ],
    )


def _goodput() -> Row:
    started = f"max {BY_JOB} (ptj_job_mesh_generation{{{JOBS}}}) > 0"
    gpu_time = "ptj_namespace_gpu_seconds_total"
    lost = f'{gpu_time}{{{JOBS},cause!~"Training|{HOLDS_NO_GPU}"}}'
    return Row(
        "Goodput",
        [
            bars(
                "Jobs with the lowest goodput",
                "Share of the job's life that was spent on steps that count, of jobs that have started.",
                "percentunit",
                Query(
                    f"sort(bottomk(10, max {BY_JOB} (ptj_job_goodput_ratio{{{JOBS}}}) and {SAME_JOB} {started}))",
                    "{{namespace}}/{{job_name}}",
                    instant=True,
                ),
                steps=[Step(0.8, ORANGE), Step(0.95, GREEN)],
                base=RED,
                link=JOB_LINK_OF_SERIES,
                maximum=1,
            ),
            bars(
                "GPU-hours lost, by cause",
                "GPU-hours of the time range in which jobs had GPUs and did not train on steps that count, also of "
                "jobs that are gone.",
                "h",
                Query(
                    f"sort_desc(sum by (cause) (increase({lost}[$__range])) / 3600 > 0)",
                    "{{cause}}",
                    instant=True,
                ),
                colors=CAUSE_COLORS,
            ),
            time_series(
                "GPUs by what their time is spent on",
                "GPUs of all jobs, by the cause that the operator books their time to.",
                "short",
                Query(rate(gpu_time, f'{JOBS},cause!~"{HOLDS_NO_GPU}"', "cause"), "{{cause}}"),
                stacked=True,
                colors=CAUSE_COLORS,
            ),
            bars(
                "GPU-hours by namespace",
                "GPU-hours of the time range in which jobs of each namespace had GPUs, also of jobs that are gone.",
                "h",
                Query(
                    "sort_desc(sum by (namespace) "
                    f'(increase({gpu_time}{{{JOBS},cause!~"{HOLDS_NO_GPU}"}}[$__range])) / 3600)',
                    "{{namespace}}",
                    instant=True,
                ),
            ),
        ],
    )


def _restarts() -> Row:
    return Row(
        "Restarts",
        [
            time_series(
                "Restarts by cause",
                "Restarts of all jobs so far, by cause.",
                "short",
                Query(
                    or_zero(f"sum by (cause) (ptj_job_restarts_total{{{JOBS}}})", "cause", f"ptj_job_info{{{JOBS}}}"),
                    "{{cause}}",
                ),
            ),
            time_series(
                "Steps lost to restarts",
                "Steps that were repeated after a restart, by namespace, since the operator started.",
                "short",
                Query(f"sum by (namespace) (ptj_job_lost_steps_total{{{JOBS}}})", "{{namespace}}"),
            ),
        ],
    )


def _operator() -> Row:
    return Row("Operator", [*_reconciles(), *_api_server(), _start_up()])


def _reconciles() -> list[Any]:
    errors = f'sum(increase(ptj_reconcile_duration_seconds_count{{{CLUSTER},result="error"}}[10m]))'
    reconciles = f"sum(increase(ptj_reconcile_duration_seconds_count{{{CLUSTER}}}[10m]))"
    buckets = f"sum by (le) (increase(ptj_reconcile_duration_seconds_bucket{{{CLUSTER}}}[10m]))"
    return [
        single_stat(
            "Leaders",
            "Operator processes that hold the Lease. It must be 1 in each cluster.",
            "short",
            Query(f"sum(ptj_leader{{{CLUSTER}}})", "leaders"),
            steps=[Step(1, GREEN)],
            base=RED,
        ),
        single_stat(
            "Failed reconciles",
            "Share of the reconciles of the last 10 minutes that failed.",
            "percentunit",
            Query(f"({errors} or 0 * max({BUILD})) / {reconciles}", "failed"),
            steps=[Step(0.01, ORANGE), Step(0.1, RED)],
            base=GREEN,
        ),
        single_stat(
            "Reconcile time, p99",
            "Time of one reconcile of a job, in the last 10 minutes.",
            "s",
            Query(f"histogram_quantile(0.99, {buckets})", "p99"),
            steps=[Step(1, ORANGE), Step(10, RED)],
            base=GREEN,
        ),
    ]


def _api_server() -> list[Any]:
    failed = f'sum(increase(ptj_api_requests_total{{{CLUSTER},code=~"0|5.."}}[10m]))'
    requests = f"sum(increase(ptj_api_requests_total{{{CLUSTER}}}[10m]))"
    return [
        single_stat(
            "Failed API requests",
            "Share of the requests to the API server of the last 10 minutes without an answer, or with a status of "
            "500 or more.",
            "percentunit",
            Query(f"({failed} or 0 * max({BUILD})) / {requests}", "failed"),
            steps=[Step(0.01, ORANGE), Step(0.1, RED)],
            base=GREEN,
        ),
        single_stat(
            "Age of the oldest watch",
            "Time since the API server last sent something on a watch.",
            "s",
            Query(f"time() - min(ptj_watch_last_contact_timestamp_seconds{{{CLUSTER}}})", "age"),
            steps=[Step(120, ORANGE), Step(300, RED)],
            base=GREEN,
        ),
    ]


def _start_up() -> Any:
    return single_stat(
        "Start-up time of jobs, p50",
        "Median time from a job's creation until all of its ranks train, of the jobs that started in the time range.",
        "s",
        Query(
            f"histogram_quantile(0.5, sum by (le) (increase(ptj_job_startup_seconds_bucket{{{CLUSTER}}}[$__range])))",
            "p50",
            instant=True,
        ),
    )


def _list() -> Row:
    return Row(
        "All jobs",
        [
            joined_table(
                "Jobs",
                "All jobs. A click on a name opens the Job board. GPU-hours are those of the job's life.",
                [
                    f"max {BY_JOB} (ptj_job_info{{{JOBS}}})",
                    f'max {BY_JOB} (ptj_job_ranks{{{JOBS},state="training"}})',
                    f'max {BY_JOB} (ptj_job_ranks{{{JOBS},state="total"}})',
                    f"max {BY_JOB} (ptj_job_step{{{JOBS}}})",
                    f"max {BY_JOB} (ptj_job_goodput_ratio{{{JOBS}}})",
                    f"clamp_min(max {BY_JOB} (ptj_job_mesh_generation{{{JOBS}}}) - 1, 0)",
                    f"max {BY_JOB} (ptj_job_placement_cost{{{JOBS}}})",
                    f"max {BY_JOB} (ptj_job_tokens_per_second{{{JOBS}}})",
                    f"max {BY_JOB} (ptj_job_eta_seconds{{{JOBS}}})",
                    f"max {BY_JOB} (ptj_job_straggler_ratio{{{JOBS}}})",
                    f"sum {BY_JOB} (ptj_job_gpu_seconds_total{{{JOBS}}}) / 3600",
                ],
                [
                    Column("namespace", "namespace"),
                    Column("job_name", "job_name", link=JOB_LINK),
                    Column("B", "ranks that train", "short"),
                    Column("C", "ranks", "short"),
                    Column("D", "step", "none"),
                    Column("I", "time left", "s"),
                    Column("H", "tokens per second", "short"),
                    Column("E", "goodput", "percentunit"),
                    Column("K", "GPU-hours", "h"),
                    Column("F", "restarts", "short"),
                    Column("G", "placement cost", "short"),
                    Column("J", "slowest rank over median", "short"),
                ],
            )
        ],
    )
