"""The alerts and recording rules. Names and thresholds are here only."""

from __future__ import annotations

from dashboards.source.queries import BY_JOB, HOLDS_NO_GPU, PLANNED_RESTARTS, SAME_JOB
from dashboards.source.rules import Alert, Group, Recording

RECONCILE_ERRORS = 0.1
WATCH_SECONDS = 300
CERTIFICATE_DAYS = 5
PROGRESS_MINUTES, LONG_STEP_SECONDS, LONG_PROGRESS_MINUTES = 10, 60, 100
CHECKPOINT_INTERVALS, CHECKPOINT_MINUTES, UNPLACED_HOURS = 3, 30, 12
RESTARTS_IN_AN_HOUR = 3
GOODPUT, GOODPUT_HOURS, GOODPUT_MINIMUM_SECONDS = 0.8, 6, 7200
THROUGHPUT = 0.8
STRAGGLER = 1.3
STAGE_QUANTILE = 0.25
"""With the median, a rank of a stage with two ranks would have to be nearly twice as slow."""
PLACEMENT_COST = 1.5
QUEUE_SECONDS = 3600

TOTAL_RANKS = 'ptj_job_ranks{state="total"}'
TRAINING_RANKS = 'ptj_job_ranks{state="training"}'


def _of_job(series: str) -> str:
    return f"max {BY_JOB} ({series})"


def _condition(kind: str, status: str = "True") -> str:
    match = "=~" if "|" in kind else "="
    selector = f'type{match}"{kind}",status="{status}"'
    return f"{_of_job(f'ptj_job_status_condition{{{selector}}}')} == 1"


CHECKPOINT_LIMIT = (
    f"clamp_min({CHECKPOINT_INTERVALS} * {_of_job('ptj_job_checkpoint_interval_seconds')}, {CHECKPOINT_MINUTES * 60})"
)
"""Age in seconds from which on a checkpoint is old."""
OWN_STEPS = (
    f"{_of_job('ptj_job_step')} - {SAME_JOB} ({_of_job('ptj_job_resumed_from_step')} or 0 * {_of_job('ptj_job_step')})"
)
"""Steps since the job began, which may be at the checkpoint of another run."""
PLACED = Recording(
    "namespace_job_name:ptj_job_status_condition:placed",
    f"({_condition('Placed')}) unless {SAME_JOB} ({_condition('Complete|Failed|Suspended')})",
)
"""Jobs that have nodes and are not finished."""
UNPLACED = Recording(
    "namespace_job_name:ptj_job_unplaced:timestamp",
    f"time() * {_of_job('ptj_job_info')} unless {SAME_JOB} {PLACED.name}",
)
"""The present time, for jobs without nodes: its maximum over a window is when a job last had none."""
FAILURES = Recording(
    "namespace_job_name:ptj_job_restarts:failures",
    f"sum {BY_JOB} (max by (cluster, namespace, job_name, cause)"
    f' (ptj_job_restarts_total{{cause!~"{PLANNED_RESTARTS}"}})) or 0 * {_of_job("ptj_job_info")}',
)
"""Restarts after failures, from the first moment of a job on: a counter of causes appears with the first restart. When
another process starts to lead, both have the job's series for a moment.
"""
STEP_P99 = Recording(
    "namespace_job_name:ptj_step_duration_seconds:p99_2h",
    "histogram_quantile(0.99, sum by (cluster, namespace, job_name, le) (rate(ptj_step_duration_seconds_bucket[2h])))",
)
THROUGHPUT_PER_RANK = Recording(
    "namespace_job_name:ptj_tokens_per_rank:rate10m",
    f"sum {BY_JOB} (rate(ptj_tokens_total[10m])) / {SAME_JOB} {_of_job(TOTAL_RANKS)}",
)
SECONDS = Recording(
    f"namespace_job_name:ptj_job_seconds:increase{GOODPUT_HOURS}h",
    f'sum {BY_JOB} (increase(ptj_job_seconds_total{{cause!~"{HOLDS_NO_GPU}"}}[{GOODPUT_HOURS}h]))',
)
JOBS_OF_NAME = Recording(
    f"namespace_job_name:ptj_job_info:jobs{GOODPUT_HOURS}h",
    f"count {BY_JOB} (count by (cluster, namespace, job_name, uid) (last_over_time(ptj_job_info[{GOODPUT_HOURS}h])))",
)
"""How many jobs have had this name lately: their series are the same, and the past of one says nothing of the next."""
GOODPUT_RATIO = Recording(
    f"namespace_job_name:ptj_job_goodput:ratio{GOODPUT_HOURS}h",
    f'sum {BY_JOB} (increase(ptj_job_seconds_total{{cause="Training"}}[{GOODPUT_HOURS}h])) / {SECONDS.name}',
)

CHECKPOINT_LIMIT = (
    f"clamp_min({CHECKPOINT_INTERVALS} * {_of_job('ptj_job_checkpoint_interval_seconds')}, {CHECKPOINT_MINUTES * 60})"
)
"""Seconds within which a job that trains saves a checkpoint."""


def _without_step(minutes: int) -> str:
    """Jobs that have had nodes for some minutes, had completed a step before, and have completed none since."""
    before = f"{_of_job(f'ptj_job_step offset {minutes}m')} and {SAME_JOB} {PLACED.name} offset {minutes}m"
    return f"({_of_job(f'changes(ptj_job_step[{minutes}m])')} == 0 and {SAME_JOB} ({before}))"


def _slower_than_its_stage() -> str:
    """Ranks that compute longer than others of their stage: stages of a pipeline have other layers, and differ."""
    stage = "cluster, namespace, job_name, stage"
    usual = f"quantile by ({stage}) ({STAGE_QUANTILE}, ptj_rank_straggler_ratio)"
    ratio = f"ptj_rank_straggler_ratio / on ({stage}) group_left () {usual}"
    return f"max by (cluster, namespace, job_name, rank) ({ratio}) > {STRAGGLER}"


OPERATOR = (
    Alert(
        "PTJOperatorDown",
        "critical",
        "No operator of Meshwright holds the Lease.",
        "No operator process that Prometheus scrapes holds the Lease. Jobs keep training, but nothing is placed, "
        "recovered or resized.",
        "no process that Prometheus scrapes holds the Lease",
        "max by (cluster) (ptj_leader) < 1 or absent(ptj_leader)",
        "5m",
        "operator",
    ),
    Alert(
        "PTJReconcileErrors",
        "warning",
        "Many reconciles of Meshwright's operator fail.",
        "{{ $value | humanizePercentage }} of the operator's reconciles have failed in the last 10 minutes.",
        f"more than {RECONCILE_ERRORS:.0%} of the reconciles of 10 minutes fail",
        'sum by (cluster) (rate(ptj_reconcile_duration_seconds_count{result="error"}[10m]))'
        f" / sum by (cluster) (rate(ptj_reconcile_duration_seconds_count[10m])) > {RECONCILE_ERRORS}",
        "15m",
        "operator",
    ),
    Alert(
        "PTJWatchStale",
        "critical",
        "A watch of Meshwright's operator receives nothing.",
        "The operator {{ $labels.instance }} has received nothing on its watch of {{ $labels.resource }} for "
        "{{ $value | humanizeDuration }}.",
        f"the API server has sent nothing on a watch for {WATCH_SECONDS // 60} minutes",
        f"time() - max by (cluster, instance, resource) (ptj_watch_last_contact_timestamp_seconds) > {WATCH_SECONDS}",
        "5m",
        "operator",
    ),
    Alert(
        "PTJCertificateExpiring",
        "warning",
        "A certificate of Meshwright's coordinator expires soon.",
        "The coordinator's certificate ({{ $labels.certificate }}) expires in {{ $value | humanizeDuration }}. It "
        "should have been renewed.",
        f"a certificate of the coordinator expires within {CERTIFICATE_DAYS} days",
        "min by (cluster, certificate) (ptj_coordinator_certificate_expiry_timestamp_seconds) - time()"
        f" < {CERTIFICATE_DAYS * 86400}",
        "1h",
        "operator",
    ),
    Alert(
        "PTJPolicyInvalid",
        "warning",
        "The administrator's policy, fabric or profiles have an error.",
        "The file with the administrator's policy, fabric or profiles has an error. The operator applies an earlier "
        "version.",
        "the file of the [policy](policy.md), the [fabric](fabric.md) or the profiles has an error, so that an earlier "
        "version is in effect",
        "min by (cluster) (ptj_policy_valid) == 0",
        "5m",
        "operator",
    ),
)

JOBS = (
    Alert(
        "PTJJobNotMakingProgress",
        "critical",
        "A job has nodes, and completes no step.",
        "{{ $labels.namespace }}/{{ $labels.job_name }} has completed no step for "
        f"{PROGRESS_MINUTES} minutes, or for ten times its step time.",
        f"a job with nodes completes no step for {PROGRESS_MINUTES} minutes; for {LONG_PROGRESS_MINUTES} minutes if "
        f"its steps take more than {LONG_STEP_SECONDS} s",
        f"({_without_step(PROGRESS_MINUTES)} and {SAME_JOB} {PLACED.name})"
        f" unless {SAME_JOB} ({STEP_P99.name} > {LONG_STEP_SECONDS} unless {SAME_JOB}"
        f" {_without_step(LONG_PROGRESS_MINUTES)})",
        "5m",
    ),
    Alert(
        "PTJJobNotTraining",
        "warning",
        "A job has nodes, and not all of its ranks train.",
        "{{ $labels.namespace }}/{{ $labels.job_name }} has had nodes for 30 minutes, and {{ $value }} of its ranks do "
        "not train.",
        "a job has nodes, and not all of its ranks train",
        f"({_of_job(TOTAL_RANKS)} - {SAME_JOB} {_of_job(TRAINING_RANKS)}) > 0 and {SAME_JOB} {PLACED.name}",
        "30m",
    ),
    Alert(
        "PTJJobStalled",
        "warning",
        "A job is stalled until somebody changes it.",
        "{{ $labels.namespace }}/{{ $labels.job_name }} has the condition Stalled. Its message says why.",
        "a job's condition `Stalled` is True",
        _condition("Stalled"),
        "5m",
    ),
    Alert(
        "PTJJobRestarted",
        "info",
        "A job restarted after a failure.",
        "{{ $labels.namespace }}/{{ $labels.job_name }} has restarted {{ $value }} times after failures in 15 minutes.",
        "a job restarted after a failure in the last 15 minutes",
        f"{FAILURES.name} - min_over_time({FAILURES.name}[15m]) > 0",
    ),
    Alert(
        "PTJRestartLoop",
        "critical",
        "A job restarts again and again.",
        "{{ $labels.namespace }}/{{ $labels.job_name }} has restarted {{ $value }} times after failures in one hour.",
        f"a job restarts {RESTARTS_IN_AN_HOUR} times or more after failures within an hour",
        f"{FAILURES.name} - min_over_time({FAILURES.name}[1h]) >= {RESTARTS_IN_AN_HOUR}",
    ),
    Alert(
        "PTJCheckpointStale",
        "warning",
        "The latest checkpoint of a job is old.",
        "The latest checkpoint of {{ $labels.namespace }}/{{ $labels.job_name }} is much older than its interval. A "
        "failure now repeats all steps since then.",
        f"the latest checkpoint is older than {CHECKPOINT_INTERVALS} intervals and {CHECKPOINT_MINUTES} minutes, and "
        f"the job has had nodes for as long, or there is none after {CHECKPOINT_INTERVALS} intervals",
        f"((time() - {_of_job('ptj_job_last_checkpoint_timestamp_seconds')}) > {SAME_JOB} {CHECKPOINT_LIMIT}"
        f" unless {SAME_JOB} (time() - max_over_time({UNPLACED.name}[{UNPLACED_HOURS}h]) <= {SAME_JOB}"
        f" {CHECKPOINT_LIMIT}) or (({OWN_STEPS} > {SAME_JOB}"
        f" {CHECKPOINT_INTERVALS} * {_of_job('ptj_job_checkpoint_interval_steps')})"
        f" unless {SAME_JOB} ptj_job_last_checkpoint_step)) and {SAME_JOB} {PLACED.name}",
        "5m",
    ),
    Alert(
        "PTJGoodputLow",
        "warning",
        "A job spends much of its time on something else than training.",
        "{{ $labels.namespace }}/{{ $labels.job_name }} has spent {{ $value | humanizePercentage }} of the last "
        f"{GOODPUT_HOURS} hours on steps that count.",
        f"less than {GOODPUT:.0%} of the time that a job had GPUs in {GOODPUT_HOURS} hours went into steps that count. "
        f"A job of less than {GOODPUT_MINIMUM_SECONDS // 3600} hours does not count, nor one whose name another job "
        "had in these hours",
        # An increase of hours outlives the job.
        f"{GOODPUT_RATIO.name} < {GOODPUT} and {SAME_JOB} {SECONDS.name} > {GOODPUT_MINIMUM_SECONDS}"
        f" and {SAME_JOB} {_of_job('ptj_job_info')} unless {SAME_JOB} ({_condition('Complete|Failed')})"
        f" unless {SAME_JOB} {JOBS_OF_NAME.name} > 1",
        "30m",
    ),
    Alert(
        "PTJThroughputDrop",
        "warning",
        "A job trains slower than before.",
        "{{ $labels.namespace }}/{{ $labels.job_name }} trains on {{ $value | humanize }} tokens per second and GPU: "
        f"less than {THROUGHPUT:.0%} of the median of the last 6 hours.",
        f"tokens per second and GPU are below {THROUGHPUT:.0%} of their median of 6 hours. A job of less than one hour "
        "does not count, nor one of which ranks have restarted in the last 10 minutes, nor one whose name another job "
        "had in these hours",
        f"{THROUGHPUT_PER_RANK.name} < {THROUGHPUT} * quantile_over_time(0.5, {THROUGHPUT_PER_RANK.name}[6h])"
        f" and {SAME_JOB} {THROUGHPUT_PER_RANK.name} offset 1h and {SAME_JOB} {PLACED.name}"
        f" and {SAME_JOB} ({_of_job(f'min_over_time({TRAINING_RANKS}[10m])')} >= {SAME_JOB} {_of_job(TOTAL_RANKS)})"
        f" unless {SAME_JOB} {JOBS_OF_NAME.name} > 1",
        "10m",
    ),
    Alert(
        "PTJStraggler",
        "warning",
        "A rank of a job is slower than the others.",
        "Rank {{ $labels.rank }} of {{ $labels.namespace }}/{{ $labels.job_name }} (pod {{ $labels.pod }}, "
        "{{ $labels.instance }}) computes {{ $value | humanize }} times as long as the median of the ranks. All others "
        "wait for it.",
        f"the compute time of a rank is more than {STRAGGLER} times the median of the job's ranks, and that of the "
        "faster ranks of its pipeline stage (their lower quartile)",
        "max by (cluster, namespace, job_name, rank, pod, instance) (ptj_rank_straggler_ratio)"
        f" > {STRAGGLER} and on (cluster, namespace, job_name, rank) ({_slower_than_its_stage()})"
        f" and {SAME_JOB} {PLACED.name}",
        "10m",
    ),
    Alert(
        "PTJLossNaN",
        "critical",
        "The loss of a job is not a number.",
        "The loss of {{ $labels.namespace }}/{{ $labels.job_name }} is NaN or infinite. Further steps are useless.",
        "a job's loss is NaN or infinite",
        f"count {BY_JOB} (ptj_loss != ptj_loss or abs(ptj_loss) == Inf) > 0",
        "1m",
    ),
    Alert(
        "PTJPlacementFragmented",
        "info",
        "A job's groups leave their NVLink domain or rack, and need not.",
        "The placement of {{ $labels.namespace }}/{{ $labels.job_name }} costs {{ $value | humanize }} times what is "
        "possible on the same nodes.",
        f"a job's placement costs more than {PLACEMENT_COST} times the bound, and its groups leave their NVLink domain "
        "or rack",
        f"({_of_job('ptj_job_placement_cost')} / {SAME_JOB} {_of_job('ptj_job_placement_cost_lower_bound')})"
        f" > {PLACEMENT_COST} and {SAME_JOB} {_of_job('ptj_job_straddling_groups')} > 0 and {SAME_JOB} {PLACED.name}",
        "30m",
    ),
    Alert(
        "PTJQueueWaitLong",
        "warning",
        "A job has been waiting for nodes for long.",
        "{{ $labels.namespace }}/{{ $labels.job_name }} has been waiting for nodes for "
        "{{ $value | humanizeDuration }}.",
        f"a job has been waiting for nodes for {QUEUE_SECONDS // 3600} hour",
        f"time() - {_of_job('ptj_job_queued_timestamp_seconds')} > {QUEUE_SECONDS}",
        board="fleet",
    ),
    Alert(
        "PTJRescaleStuck",
        "warning",
        "A resize of an elastic job does not end.",
        "{{ $labels.namespace }}/{{ $labels.job_name }} has been resizing for 15 minutes.",
        "an elastic job's condition `Rescaling` is True, and the job has nodes",
        f"{_condition('Rescaling')} and {SAME_JOB} {PLACED.name}",
        "15m",
    ),
)

GROUPS = (
    Group(
        "meshwright.records",
        (PLACED, UNPLACED, FAILURES, STEP_P99, THROUGHPUT_PER_RANK, SECONDS, JOBS_OF_NAME, GOODPUT_RATIO),
    ),
    Group("meshwright.operator", OPERATOR),
    Group("meshwright.jobs", JOBS),
)
ALERTS = (*OPERATOR, *JOBS)
