"""The Job board: whether one job trains, how fast, who is slow, where the time goes, and whether it learns."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as models

from dashboards.source.board import (
    JOB_UID,
    Annotation,
    Row,
    build,
    choice_variable,
    logs_link,
    logs_variables,
    query_variable,
)
from dashboards.source.panels import (
    BLUE,
    CAUSE_COLORS,
    GREEN,
    GREY,
    ORANGE,
    RED,
    Column,
    Query,
    Step,
    bars,
    heat_map,
    joined_table,
    single_stat,
    state_timeline,
    time_series,
)
from dashboards.source.queries import (
    CLUSTER,
    JOB,
    PLANNED_RESTARTS,
    RATE,
    conditions,
    new_events,
    or_zero,
    padded_rank,
    quantile,
    rate,
)

PODS_OF_JOB = "${job_name}-w[0-9]+-[0-9]+"
INFO = f"ptj_job_info{{{JOB}}}"
STATES = {"1": ("True", BLUE), "0": ("False", GREY), "2": ("Unknown", ORANGE)}
POD_OF_JOB = '$dcgm_namespace="$namespace",$dcgm_pod=~"$job_name-w[0-9]+-[0-9]+"'
"""Selects the GPUs of the job in metrics of NVIDIA's DCGM exporter."""


def board() -> dict[str, Any]:
    """Return the JSON of the board."""
    return build(
        uid=JOB_UID,
        title="Meshwright / Job",
        description="One ParallelTrainingJob: state, speed, slow ranks, time by cause, learning and hardware.",
        variables=_variables(),
        annotations=_annotations(),
        links=[_logs()],
        rows=[_training(), _speed(), _slow_ranks(), _time(), _learning(), _placement(), _hardware(), _pods()],
    )


def _logs() -> dashboard.DashboardLink:
    """The link to the logs of all worker pods of the job."""
    link = dashboard.DashboardLink("Logs").type(models.DashboardLinkType.LINK).url(logs_link(PODS_OF_JOB))
    return link.tooltip("Logs of the job's worker pods").target_blank(True).icon("doc")


def _variables() -> list[Any]:
    return [
        query_variable(
            "namespace",
            "Namespace",
            "Namespace of the job.",
            f"label_values(ptj_job_info{{{CLUSTER}}}, namespace)",
        ),
        query_variable(
            "job_name",
            "Job",
            "Name of the job.",
            f'label_values(ptj_job_info{{{CLUSTER},namespace="$namespace"}}, job_name)',
        ),
        choice_variable(
            "dcgm_namespace",
            "DCGM namespace label",
            "Label of the pod's namespace in metrics of the DCGM exporter: `namespace` if Prometheus honors labels.",
            ["exported_namespace", "namespace"],
        ),
        choice_variable(
            "dcgm_pod",
            "DCGM pod label",
            "Label of the pod's name in metrics of the DCGM exporter: `pod` if Prometheus honors labels.",
            ["exported_pod", "pod"],
        ),
        *logs_variables(),
    ]


def _annotations() -> list[Annotation]:
    failures = f'ptj_job_restarts_total{{{JOB},cause!~"{PLANNED_RESTARTS}"}}'
    planned = f'ptj_job_restarts_total{{{JOB},cause=~"{PLANNED_RESTARTS}",cause!="Rescaled"}}'
    rescales = f'ptj_job_restarts_total{{{JOB},cause="Rescaled"}}'
    return [
        Annotation("Failures", new_events(failures, "cause", "1m", INFO), "Restart: {{cause}}", RED),
        Annotation("Planned restarts", new_events(planned, "cause", "1m", INFO), "Restart: {{cause}}", BLUE),
        Annotation("Rescales", new_events(rescales, "cause", "1m", INFO), "Rescaled", "purple"),
    ]


def _training() -> Row:
    found = " or ".join(
        f"{value} * " + conditions(f'{JOB},status="{status}"', "type")
        for value, status in (("1", "True"), ("0", "False"), ("2", "Unknown"))
    ).replace("1 * max", "max")
    return Row(
        "Is it training?",
        [
            *_progress_stats(),
            *_loss_stats(),
            state_timeline(
                "Conditions",
                "Conditions of the job over time. Red: a condition that reports a problem is True.",
                Query(found, "{{type}}"),
                states=STATES,
                alarming="/Stalled|Failed/",
            ),
        ],
    )


def _progress_stats() -> list[Any]:
    """How far the job is."""
    return [
        single_stat(
            "Ranks that train",
            "Ranks that train, of all ranks of the job.",
            "percentunit",
            Query(
                f'max(ptj_job_ranks{{{JOB},state="training"}}) / max(ptj_job_ranks{{{JOB},state="total"}})',
                "ranks that train",
            ),
            steps=[Step(0.5, ORANGE), Step(1, GREEN)],
            base=RED,
            span=3,
        ),
        single_stat(
            "Step",
            "Last completed training step in the job's status, and the number of steps of the run.",
            "none",
            Query(f"max(ptj_job_step{{{JOB}}})", "step"),
            Query(f"max(ptj_job_target_steps{{{JOB}}})", "of"),
            names=True,
            span=3,
        ),
        single_stat(
            "Time left",
            "Estimated time to the last step, at the recent step time.",
            "s",
            Query(f"max(ptj_job_eta_seconds{{{JOB}}})", "time left"),
            span=3,
        ),
    ]


def _loss_stats() -> list[Any]:
    """How much of its time is lost, and what a failure would cost now."""
    return [
        single_stat(
            "Goodput, 1 hour",
            "Share of the last hour that was spent on steps that count. Time of suspension does not count.",
            "percentunit",
            Query(_goodput("1h"), "goodput"),
            steps=[Step(0.8, ORANGE), Step(0.95, GREEN)],
            base=RED,
            span=3,
        ),
        single_stat(
            "Goodput, whole run",
            "Share of the job's life that was spent on steps that count. Time of suspension does not count.",
            "percentunit",
            Query(f"max(ptj_job_goodput_ratio{{{JOB}}})", "goodput"),
            steps=[Step(0.8, ORANGE), Step(0.95, GREEN)],
            base=RED,
            span=3,
        ),
        single_stat(
            "Restarts",
            "Starts of a mesh generation after the first one, for every cause.",
            "short",
            Query(f"clamp_min(max(ptj_job_mesh_generation{{{JOB}}}) - 1, 0)", "restarts"),
            decimals=0,
            span=3,
        ),
        single_stat(
            "Age of the last checkpoint",
            "Time since the latest complete checkpoint, and the time between checkpoints. A failure now would repeat "
            "the steps since the checkpoint.",
            "s",
            Query(f"time() - max(ptj_job_last_checkpoint_timestamp_seconds{{{JOB}}})", "age"),
            Query(f"max(ptj_job_checkpoint_interval_seconds{{{JOB}}})", "interval"),
            names=True,
            span=6,
        ),
    ]


def _goodput(window: str) -> str:
    training = f'sum(increase(ptj_job_seconds_total{{{JOB},cause="Training"}}[{window}]))'
    return f'{training} / sum(increase(ptj_job_seconds_total{{{JOB},cause!="Suspended"}}[{window}]))'


def _speed() -> Row:
    return Row(
        "How fast?",
        [
            time_series(
                "Tokens per second",
                "Tokens that the job trains on, per second of wall time: it is 0 while ranks restart.",
                "short",
                Query(rate("ptj_tokens_total", JOB), "tokens/s"),
                span=6,
            ),
            time_series(
                "FLOP per second",
                "Floating-point operations per second of wall time, of all GPUs: of the model, and with the "
                "recomputation of activation checkpointing.",
                "flops",
                Query(rate("ptj_model_flops_total", JOB), "model"),
                Query(rate("ptj_hardware_flops_total", JOB), "with recomputation"),
                span=6,
            ),
            time_series(
                "Utilization of the GPUs",
                "Model FLOPs (MFU) and model FLOPs with recomputation (HFU), as a share of the dense bf16 peak. "
                "Empty if the peak is not known.",
                "percentunit",
                Query(f"max(ptj_mfu{{{JOB}}})", "MFU"),
                Query(f"max(ptj_hfu{{{JOB}}})", "HFU"),
                span=6,
            ),
            time_series(
                "Step time",
                "Time of a training step, over all ranks.",
                "s",
                Query(quantile(0.5, "ptj_step_duration_seconds", JOB), "p50"),
                Query(quantile(0.99, "ptj_step_duration_seconds", JOB), "p99"),
                span=6,
            ),
        ],
    )


def _slow_ranks() -> Row:
    ratio = f"max by (rank) (ptj_rank_straggler_ratio{{{JOB}}})"
    slowest = f"sort_desc(topk(10, max by (rank, stage, pod, instance) (ptj_rank_straggler_ratio{{{JOB}}})))"
    return Row(
        "Who is slow?",
        [
            heat_map(
                "Compute time of each rank over the median",
                "Recent compute time of each rank over the median of all ranks, one row for each rank. Red: all others "
                "wait for this rank. A rank that is red for long is on a slow GPU or node. In a pipeline, all ranks of "
                "a stage with more to compute are red.",
                "short",
                Query(padded_rank(ratio), "{{rank}}"),
                minimum=0.5,
                maximum=1.5,
            ),
            bars(
                "Slowest ranks",
                "The ten ranks with the longest compute time over the median, with the pod and its address. Compare "
                "ranks of the same stage.",
                "short",
                Query(slowest, "rank {{rank}}, stage {{stage}}, {{pod}}, {{instance}}", instant=True),
                steps=[Step(1.15, ORANGE), Step(1.3, RED)],
                base=GREEN,
            ),
            time_series(
                "Waits for communication",
                "Share of the time in which ranks wait for communication that no computation hides, by dimension of "
                "the mesh: mean of the ranks. Dimension job: all ranks, for the result of a step.",
                "percentunit",
                Query(
                    f"avg by (dimension) (rate(ptj_exposed_communication_seconds_total{{{JOB}}}[{RATE}]))",
                    "{{dimension}}",
                ),
                stacked=True,
            ),
        ],
    )


def _time() -> Row:
    return Row("Where does the time go?", [*_time_by_cause(), *_time_of_steps(), *_time_of_checkpoints_and_starts()])


def _time_by_cause() -> list[Any]:
    return [
        time_series(
            "Time by cause",
            "Share of the time that each cause takes. Training is time on steps that count; the others are lost.",
            "percentunit",
            Query(
                f"sum by (cause) (increase(ptj_job_seconds_total{{{JOB}}}[5m]))"
                f" / on () group_left () sum(increase(ptj_job_seconds_total{{{JOB}}}[5m]))",
                "{{cause}}",
            ),
            stacked=True,
            colors=CAUSE_COLORS,
            maximum=1,
        ),
        bars(
            "Time by cause, whole run",
            "Seconds of the job's life by cause.",
            "s",
            Query(f"sort_desc(sum by (cause) (ptj_job_seconds_total{{{JOB}}}) > 0)", "{{cause}}", instant=True),
            colors=CAUSE_COLORS,
        ),
    ]


def _time_of_steps() -> list[Any]:
    return [
        time_series(
            "Time of a step by phase",
            "Share of the time of steps that each phase takes: mean of the ranks. Communication is the part that "
            "no computation hides.",
            "percentunit",
            Query(
                f"{rate('ptj_step_phase_seconds_total', JOB, 'phase')}"
                f" / on () group_left () {rate('ptj_step_phase_seconds_total', JOB)}",
                "{{phase}}",
            ),
            stacked=True,
            maximum=1,
            span=8,
        ),
        time_series(
            "What limits the steps",
            "What takes the largest part of recent steps, and how much of them: computation, data, a slow rank, "
            "communication of a dimension, or the pipeline. As in `status.limit`.",
            "percentunit",
            Query(f"max by (limit, dimension) (ptj_job_step_limit_ratio{{{JOB}}})", "{{limit}} {{dimension}}"),
            maximum=1,
            span=8,
        ),
        time_series(
            "Pipeline bubble",
            "Part of the time in which ranks wait for other stages of the pipeline: as measured (mean of ranks), "
            "and as simulated for stages of equal time. Empty without a pipeline.",
            "percentunit",
            Query(f"avg(ptj_pipeline_bubble_measured_ratio{{{JOB}}})", "measured"),
            Query(f"max(ptj_pipeline_bubble_simulated_ratio{{{JOB}}})", "simulated"),
            span=8,
        ),
        time_series(
            "Wait for data",
            "Share of the time in which steps wait for data: mean and the slowest rank.",
            "percentunit",
            Query(f"avg(rate(ptj_data_wait_seconds_total{{{JOB}}}[{RATE}]))", "mean"),
            Query(f"max(rate(ptj_data_wait_seconds_total{{{JOB}}}[{RATE}]))", "slowest rank"),
            span=8,
        ),
    ]


def _time_of_checkpoints_and_starts() -> list[Any]:
    return [
        time_series(
            "Time of checkpoints",
            "Mean time to save a checkpoint until it is durable, and to load one.",
            "s",
            Query(_mean_over("ptj_checkpoint_duration_seconds", "op"), "{{op}}"),
            span=8,
        ),
        time_series(
            "Phases of the last start",
            "Time of each phase of the last start of the ranks.",
            "s",
            Query(f"max by (phase) (ptj_startup_phase_seconds{{{JOB}}})", "{{phase}}"),
            stacked=True,
            span=8,
        ),
    ]


def _mean_over(histogram: str, *by: str) -> str:
    """The mean of a histogram since the pod started: checkpoints are too rare for a rate."""
    labels = ", ".join(by)
    return f"sum by ({labels}) ({histogram}_sum{{{JOB}}}) / sum by ({labels}) ({histogram}_count{{{JOB}}})"


def _learning() -> Row:
    return Row(
        "Is it learning?",
        [
            time_series(
                "Loss",
                "Mean loss per token of the last step, and of the latest evaluation on held-out documents.",
                "short",
                Query(f"max(ptj_loss{{{JOB}}})", "training"),
                Query(f"max(ptj_job_evaluation_loss{{{JOB}}})", "evaluation"),
                span=8,
                minimum=None,
            ),
            time_series(
                "Gradient norm",
                "Global gradient norm of the last step, before clipping.",
                "short",
                Query(f"max(ptj_grad_norm{{{JOB}}})", "gradient norm"),
                span=8,
            ),
            time_series(
                "Learning rate",
                "Learning rate of the last step.",
                "sci",
                Query(f"max(ptj_learning_rate{{{JOB}}})", "learning rate"),
                span=8,
            ),
            time_series(
                "Load of experts",
                "Tokens of the busiest expert of each layer over the mean: 1 is even. Empty for a dense model.",
                "short",
                Query(f"max by (layer) (ptj_expert_load_imbalance{{{JOB}}})", "layer {{layer}}"),
                minimum=1,
            ),
            time_series(
                "Skipped and repeated steps",
                "Steps that updated nothing, because gradients overflowed fp16 or by `training.anomalies`, and steps "
                "that were repeated after a restart.",
                "short",
                Query(f"max(ptj_skipped_steps_total{{{JOB}}})", "skipped, since rank 0's pod started"),
                Query(f"max(ptj_job_lost_steps_total{{{JOB}}})", "repeated, since the operator started"),
            ),
        ],
    )


def _placement() -> Row:
    return Row(
        "Where does it run?",
        [
            time_series(
                "Placement cost",
                "Cost of the placement, and the bound that no placement on the same free nodes is below: milliseconds "
                "per step for network crossings, or a relative number if the GPUs are not known.",
                "short",
                Query(f"max(ptj_job_placement_cost{{{JOB}}})", "cost"),
                Query(f"max(ptj_job_placement_cost_lower_bound{{{JOB}}})", "lower bound"),
                span=8,
            ),
            time_series(
                "Straddling groups",
                "Tensor-parallel groups that leave their NVLink domain, and replicas whose pipeline leaves its rack.",
                "short",
                Query(f"max by (kind) (ptj_job_straddling_groups{{{JOB}}})", "{{kind}}"),
                span=8,
            ),
            time_series(
                "Replicas",
                "Current number of replicas, and how many an elastic job has if there are enough nodes.",
                "short",
                Query(f"max(ptj_job_replicas{{{JOB}}})", "current"),
                Query(f"max(ptj_job_replicas_wanted{{{JOB}}})", "wanted"),
                span=8,
            ),
        ],
    )


def _hardware() -> Row:
    panels = [
        ("Tensor cores", "Share of cycles in which the tensor cores work.", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
         "percentunit"),
        ("GPU memory in use", "Frame buffer memory in use.", "DCGM_FI_DEV_FB_USED * 1048576", "bytes"),
        ("Power", "Power draw of each GPU.", "DCGM_FI_DEV_POWER_USAGE", "watt"),
        ("Temperature", "Temperature of each GPU.", "DCGM_FI_DEV_GPU_TEMP", "celsius"),
        ("Clock of the SMs", "Clock of the streaming multiprocessors. A lower clock on one GPU slows all ranks.",
         "DCGM_FI_DEV_SM_CLOCK * 1000000", "hertz"),
        ("NVLink traffic", "Bytes per second that each GPU sends over NVLink.", "DCGM_FI_PROF_NVLINK_TX_BYTES", "Bps"),
        ("PCIe traffic", "Bytes per second that each GPU sends over PCIe, to the host and to network cards.",
         "DCGM_FI_PROF_PCIE_TX_BYTES", "Bps"),
        ("Last XID error", "Number of the last XID error of each GPU; 0 if there was none.", "DCGM_FI_DEV_XID_ERRORS",
         "short"),
    ]  # fmt: skip
    found = []
    for title, description, metric, unit in panels:
        name, _, scale = metric.partition(" ")
        selector = f"{name}{{{CLUSTER},{POD_OF_JOB}}}"
        expr = f"max by ($dcgm_pod, gpu) ({selector}){' ' + scale if scale else ''}"
        text = f"{description} From NVIDIA's DCGM exporter."
        found.append(time_series(title, text, unit, Query(expr, "{{$dcgm_pod}} GPU {{gpu}}"), span=6))
    memory = time_series(
        "Peak of memory",
        "The most memory that a rank used, by kind: of its GPU by tensors and by torch's allocator, and of the host.",
        "bytes",
        Query(f"max by (kind) (ptj_memory_peak_bytes{{{JOB}}})", "{{kind}}, largest rank"),
        Query(f"min by (kind) (ptj_memory_peak_bytes{{{JOB}}})", "{{kind}}, smallest rank"),
        span=24,
    )
    return Row("Hardware", [memory, *found])


def _pods() -> Row:
    pods = f"max by (instance, pod, rank) (ptj_rank_up{{{JOB}}})"
    restarts = f"sum by (instance, pod) (ptj_rank_restarts_total{{{JOB}}})"
    return Row(
        "Pods",
        [
            joined_table(
                "Ranks and their pods",
                "The pod of each rank, whether its process runs, and its last completed step.",
                [pods, f"max by (instance, pod, rank) (ptj_step{{{JOB}}})"],
                [
                    Column("rank", "rank"),
                    Column("pod", "pod", link=logs_link("${__value.raw}"), link_title="Logs of the pod"),
                    Column("instance", "address"),
                    Column("A", "process runs", "bool_yes_no"),
                    Column("B", "step", "none"),
                ],
                span=12,
            ),
            time_series(
                "Restarts of rank processes",
                "Rank processes that each pod started after its first mesh generation.",
                "short",
                Query(restarts, "{{instance}}"),
                span=12,
                height=9,
            ),
            bars(
                "Restarts by cause",
                "Starts of a mesh generation after the first one, by cause.",
                "short",
                Query(or_zero(f"max by (cause) (ptj_job_restarts_total{{{JOB}}})", "cause", INFO), "{{cause}}", True),
                height=6,
            ),
            time_series(
                "Age of the oldest report",
                "Time since the last report of the agent that has been silent for the longest time. If none reports "
                "for 60 s, the job is not known to train.",
                "s",
                Query(f"max(ptj_job_oldest_report_age_seconds{{{JOB}}})", "age"),
                height=6,
            ),
        ],
    )
