"""`status` of a ParallelTrainingJob: what the operator observed and decided. Only the operator writes it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Annotated

from pydantic import Field

from meshwright.api.base import MAX_SAFE_INTEGER, ApiModel, Count, Time
from meshwright.api.goodput import GoodputStatus
from meshwright.api.parallelism import ContextMethod, PipelineSchedule
from meshwright.api.training import ActivationCheckpointing

Text = Annotated[str, Field(max_length=1024)]

MAX_CONDITIONS = 16
MAX_RESTART_CAUSES = 16
MAX_CHECKPOINT_TIERS = 8
MAX_APPLIED_SPEC = 131072
MAX_APPLIED_PROFILE = 32768
MAX_RESTART_TIMES = 128
MAX_SUCCEEDED_WORKERS = 32768


def added(count: int, more: int = 1) -> int:
    """`count + more`, at most the largest count: the API server rejects a status with a larger one entirely."""
    return min(count + more, MAX_SAFE_INTEGER)


class Condition(ApiModel):
    """A condition in the form of `metav1.Condition`."""

    type: Annotated[str, Field(min_length=1, max_length=316)]
    """Name of the condition."""
    status: Annotated[str, Field(pattern="^(True|False|Unknown)$", max_length=7)]
    """True, False or Unknown."""
    observed_generation: Count | None = None
    """The `metadata.generation` that this condition is about."""
    last_transition_time: Time
    """When `status` last changed."""
    reason: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    """Reason in one CamelCase word."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """Details for people."""


class LayoutStatus(ApiModel):
    """Degrees, micro-batches and techniques of a layout."""

    tensor: Count
    """Tensor-parallel degree."""
    pipeline: Count
    """Pipeline-parallel degree."""
    data: Count
    """Data-parallel degree."""
    context: Count = 1
    """Context-parallel degree."""
    expert: Annotated[int, Field(ge=1, le=65536)] = 1
    """Expert-parallel degree: number of ranks with the same dense parameters that the experts are spread over."""
    micro_batches: Count
    """Micro-batches per replica and step."""
    schedule: PipelineSchedule | None = None
    """Pipeline schedule. Not set without a pipeline."""
    virtual_stages: Count | None = None
    """Stages of one rank. Only set with a schedule that has several."""
    context_method: ContextMethod | None = None
    """How the ranks of a context group compute attention. Only set with a context degree above 1."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = None
    """ZeRO stage: 0 none, 1 optimizer state, 2 gradients too, 3 parameters too. Not set with `runtime.command`."""
    activation_checkpointing: ActivationCheckpointing | None = None
    """What the backward pass recomputes. Not set with `runtime.command`."""


class PlanStatus(LayoutStatus):
    """The layout in effect, and why."""

    world_size: Count
    """Number of ranks."""
    workers: Count
    """Number of worker pods."""
    unused_gpus: Count | None = None
    """GPUs of `spec.gpus` that the plan does not use. Not set without `spec.gpus`."""
    memory_per_rank_bytes: Count | None = None
    """Estimated peak memory of the fullest rank."""
    parameters: Count | None = None
    """Parameters of the model."""
    estimated_step_milliseconds: Count | None = None
    """Estimated time of one step. Not set if model or GPUs are unknown."""
    estimated_tokens_per_second: Count | None = None
    """Estimated throughput of the job."""
    summary: Text = ""
    """The layout in one line, such as `TP 2 x PP 2 x DP 2`."""
    reasons: Annotated[list[Text], Field(max_length=16)] = []
    """Why each degree was chosen."""
    revision: Annotated[str, Field(max_length=64)] = ""
    """Hash of the parts of `spec` that determine the plan and the pods, after the number of the scheme that computed
    it. If an edit changes it, the workers restart."""
    replanned: bool | None = None
    """True if the layout was planned anew for the GPUs that were left, by `elastic.replan`. Not set otherwise."""
    measured_layers: Annotated[list[Annotated[int, Field(ge=1, le=1024)]], Field(max_length=1024)] | None = None
    """Layers of each stage by the times of the first steps (`stageBalance: Measured`). Not set before."""
    environment: Annotated[dict[str, Text], Field(max_length=64)] | None = None
    """Variables of NCCL and gloo that all ranks get, unless `workers.env` or the image sets them. They follow from the
    fabric of the site when the job is planned. Not set without any."""


class WorkerPlacement(ApiModel):
    """Where one worker runs."""

    worker: Count
    """Worker index."""
    incarnation: Count
    """How often this worker's pod was replaced."""
    pod: Annotated[str, Field(max_length=253)]
    """Name of the pod."""
    node: Annotated[str, Field(max_length=253)]
    """Name of the node."""
    ranks: Annotated[str, Field(max_length=64)]
    """First and last rank of the pod, such as `4-5`."""
    domain: Annotated[str, Field(max_length=253)] = ""
    """NVLink domain of the node."""
    rack: Annotated[str, Field(max_length=253)] = ""
    """Rack (leaf switch) of the node."""


def format_ranks(ranks: range) -> str:
    """Consecutive ranks as a string."""
    return str(ranks.start) if len(ranks) == 1 else f"{ranks.start}-{ranks.stop - 1}"


@lru_cache(maxsize=16384)
def parse_ranks(text: str) -> range | None:
    """The ranks of a string, or None if it is invalid. Cached, because each reconcile reads those of all workers."""
    first, _, last = text.partition("-")
    last = last or first
    if not (first.isdecimal() and last.isdecimal()) or int(last) < int(first):
        return None
    return range(int(first), int(last) + 1)


def in_rank_order(workers: Sequence[WorkerPlacement]) -> list[WorkerPlacement]:
    """The workers in the order of their ranks. Empty unless the ranks start at 0 and all workers have equally many."""
    read = [(ranks, entry) for entry in workers if (ranks := parse_ranks(entry.ranks)) is not None]
    ordered = sorted(read, key=lambda pair: pair[0].start)
    size = len(ordered[0][0]) if ordered else 0
    whole = all(ranks == range(index * size, (index + 1) * size) for index, (ranks, _) in enumerate(ordered))
    return [entry for _, entry in ordered] if whole and len(read) == len(workers) else []


class PlacementStatus(ApiModel):
    """The node of every worker, now or when it last ran, and the cost of the placement."""

    # A map with a thousand keys would take the API server a third of a second in every write of the status.
    workers: Annotated[
        list[WorkerPlacement], Field(max_length=1024, json_schema_extra={"x-list-map-key": "worker", "x-atomic": True})
    ] = []
    """The placement of each worker."""
    tensor: Count = 0
    """Tensor-parallel degree of the plan that was placed."""
    pipeline: Count = 0
    """Pipeline-parallel degree of the plan that was placed."""
    data: Count = 0
    """Replicas of the plan that was placed."""
    cost: Annotated[str, Field(max_length=64)] = ""
    """Cost of the placement: estimated milliseconds per step for crossing domains, racks and zones, summed over all
    groups of ranks. 0 means no crossings. If model or GPUs are unknown, the number is relative."""
    gap: Annotated[str, Field(max_length=64)] = ""
    """Largest fraction of the cost that the best placement on the same free nodes could save, or the best mapping of
    ranks onto the nodes that another scheduler chose. 0 means proved optimal. Empty: unknown, with `spec.topology`."""
    straddling_tensor_groups: Count = 0
    """Number of tensor-parallel groups that leave their NVLink domain."""
    straddling_replicas: Count = 0
    """Number of replicas whose pipeline leaves its rack."""
    topology: Annotated[dict[str, Annotated[str, Field(max_length=16)]], Field(max_length=8)] | None = None
    """With `spec.topology`: dimension -> the closest level that none of its groups leaves, or `cluster`."""
    spares: Annotated[list[Annotated[str, Field(max_length=253)]], Field(max_length=64)] = []
    """Nodes reserved for replacements of lost workers, the most useful first."""


class MemoryRecoveryStatus(ApiModel):
    """How a generation went on from the state that ranks held in memory."""

    generation: Count
    """The earliest generation since which one of them held it."""
    step: Count
    """The step from which all ranks went on."""
    leader: Count
    """A rank that had completed this step."""
    ranks: Annotated[str, Field(max_length=MAX_SUCCEEDED_WORKERS)]
    """The ranks that kept their processes and state, as ranges such as `0-2,5`."""
    holders: Annotated[str, Field(max_length=MAX_SUCCEEDED_WORKERS)] | None = None
    """If all ranks went back to copies: each other rank with that which had its copy, such as `3:1,4:2`."""


class MemoryCopiesStatus(ApiModel):
    """Copies of the ranks' state in host memory."""

    every_steps: Count
    """Steps between two copies."""
    shift: Count
    """Rank r has its copy on rank r + shift, modulo the number of ranks."""
    survives: Annotated[str, Field(max_length=128)] = ""
    """Which losses they survive, such as `the loss of any rank, worker, node or rack`."""


class ReplicaGroupStatus(ApiModel):
    """A replica group of torchft."""

    master: Annotated[str, Field(max_length=128)]
    """Its store."""
    since: Count
    """Generation in which its ranks started."""


class ReplicaGroupsStatus(ApiModel):
    """The replica groups of torchft."""

    lighthouse: Annotated[str, Field(max_length=128)] = ""
    """Address of the job's lighthouse."""
    groups: Annotated[list[ReplicaGroupStatus], Field(max_length=1024)]
    """All groups."""


class MeshStatus(ApiModel):
    """The mesh generation: a new one each time the set of worker processes changes."""

    generation: Count = 0
    """Number of the generation; 0 before the first start."""
    master: Annotated[str, Field(max_length=128)] = ""
    """`address:port` of rank 0's store."""
    started_time: Time | None = None
    """When this generation was announced."""
    cause: Annotated[str, Field(max_length=128)] = ""
    """Why the generation was formed, such as `Start`, `PodLost`, `RankFailure` or `Resume`."""
    pending_cause: Annotated[str, Field(max_length=128)] = ""
    """Why the next generation is being formed. Empty while this one is current."""
    pending_since: Time | None = None
    """Time since which the next generation is being formed."""
    attempts: Count = 0
    """Number of failed attempts to start the gang since it last ran: pods were rejected, or did not start in time."""
    retry_time: Time | None = None
    """Time of the next attempt."""
    failures: Count = 0
    """Number of consecutive failures of the job's processes, including those that do not count toward
    `recovery.maxRestarts`. It determines the delay before the next start. Ten minutes of training reset it."""
    succeeded_workers: Annotated[str, Field(max_length=MAX_SUCCEEDED_WORKERS)] = ""
    """Workers that have completed the run in this generation, as ranges such as `0-3,7`. They stay complete if their
    pods are deleted."""
    completed_time: Time | None = None
    """When all workers that the job waits for had completed the run in this generation. Their pods should exit soon."""
    in_memory: Annotated[str, Field(max_length=256)] | None = None
    """The layout of the generation, if its ranks hold their state when it is interrupted (`recovery.inMemory`)."""
    copies: MemoryCopiesStatus | None = None
    """The copies that its ranks make in host memory (`recovery.copyEverySteps`)."""
    node_check: bool | None = None
    """Whether the generation began with a check of its nodes (`recovery.suspectNodes.checkNodes`)."""
    recovery: MemoryRecoveryStatus | None = None
    """How the generation went on from state in memory. Missing if its ranks started from a checkpoint or anew."""
    replica_groups: ReplicaGroupsStatus | None = None
    """Replica groups of `TorchFT`."""
    agent_replacements: Count = 0
    """Number of pods that were replaced since the gang last ran, because their agents did not reach the operator."""


class ElasticStatus(ApiModel):
    """The size of an elastic job."""

    wanted_replicas: Count = 0
    """Replicas with which the job runs if there are enough nodes."""
    micro_batches: Count = 0
    """Micro-batches of all replicas in one step at the full size. Every other size has at least as many."""
    resized_time: Time | None = None
    """Time of the last resize."""
    incarnation: Count = 0
    """The highest incarnation of any pod of the job so far. Pods of workers that join have a higher one."""
    next_placement: PlacementStatus | None = None
    """The placement after a growth that has begun: its new workers start while the others train, and take part as soon
    as all of them are ready."""
    growing_since: Time | None = None
    """Time since which they start."""
    attempts: Count = 0
    """Number of attempts to grow that failed in a row."""
    retry_time: Time | None = None
    """Time before which the job does not try to grow again."""
    full_plan: LayoutStatus | None = None
    """With `elastic.replan`: the layout to which the job returns after it was planned anew for fewer GPUs."""


class EvaluationStatus(ApiModel):
    """The latest evaluation on held-out documents."""

    step: Count
    """Step after which the evaluation ran."""
    loss: Annotated[str, Field(max_length=32)]
    """Mean loss per token."""
    perplexity: Annotated[str, Field(max_length=32)]
    """Exponential of the loss, or `inf` if that is too large for a number."""


class CheckpointStatus(ApiModel):
    """The latest durable checkpoint."""

    step: Count
    """Step after which it was saved."""
    time: Time
    """When it became complete."""
    path: Annotated[str, Field(max_length=1024)]
    """Path of the checkpoint in worker pods."""


class ResumedFromStatus(ApiModel):
    """The checkpoint of another run that training began from."""

    step: Count
    """Its step."""
    path: Annotated[str, Field(max_length=1024)]
    """Its path in worker pods, or its URI."""


class CheckpointTierStatus(ApiModel):
    """One place where checkpoints are saved, how often, and whether that works."""

    place: Annotated[str, Field(max_length=1024)]
    """Path in worker pods, or URI."""
    step: Count | None = None
    """Step of its newest complete checkpoint."""
    time: Time | None = None
    """When that was saved."""
    every_steps: Count | None = None
    """Steps between its checkpoints. Not set if the interval is a time."""
    interval_seconds: Count | None = None
    """Seconds between its checkpoints."""
    reason: Annotated[str, Field(max_length=512)] = ""
    """What the interval follows from, with `Auto`."""
    error: Annotated[str, Field(max_length=1024)] = ""
    """Why the last save failed. Empty if it did not."""
    best_step: Count | None = None
    """Step of its best checkpoint, with `checkpoint.keepBest`."""
    best_loss: Annotated[str, Field(max_length=32)] | None = None
    """Its evaluation loss."""


class CheckpointRequestStatus(ApiModel):
    """The last request for a checkpoint, by the annotation `meshwright.dev/checkpoint`, and what became of it."""

    request: Annotated[str, Field(max_length=64)]
    """Value of the annotation. Another value is another request."""
    state: Annotated[str, Field(max_length=16, pattern="^(Requested|Saved|Failed)$")]
    """`Requested` until the checkpoint is durable, then `Saved`; `Failed` if there is none."""
    time: Time
    """When the operator saw the request."""
    generation: Count = 0
    """Mesh generation whose ranks are asked."""
    step: Count | None = None
    """Step of the checkpoint. Before it is known: the last completed step at the time of the request."""
    message: Text = ""
    """Details for people."""


class WaitingEditStatus(ApiModel):
    """An edit that restarts the gang, and that waits because of `spec.updatePolicy`."""

    revision: Annotated[str, Field(max_length=64)]
    """Revision of the edited spec."""
    waits_for: Annotated[str, Field(max_length=64)]
    """What it waits for: `Checkpoint`, then `Nodes`; or `Restart`."""
    since: Time
    """When it began to wait."""
    checkpoint_step: Count | None = None
    """Step of the latest checkpoint then; not set if there was none."""


class RestartStatus(ApiModel):
    """Restarts of one cause."""

    cause: Annotated[str, Field(min_length=1, max_length=64)]
    """The cause, as in `mesh.cause`."""
    count: Count
    """Number of restarts."""


class FailureStatus(ApiModel):
    """The latest failure of the job's own processes, and what the failed rank has left behind."""

    time: Time
    """When the operator detected it."""
    generation: Count
    """The mesh generation that it ended."""
    cause: Annotated[str, Field(max_length=64)]
    """Its cause, as in `mesh.cause`: `RankFailure`, `Hang` or `PodFailed`."""
    message: Text = ""
    """What happened."""
    worker: Count | None = None
    """The worker that failed, or the one with the rank that is the likely cause."""
    pod: Annotated[str, Field(max_length=253)] = ""
    """Its pod."""
    node: Annotated[str, Field(max_length=253)] = ""
    """The node of the pod."""
    rank: Count | None = None
    """The rank that failed first, or the likely cause."""
    log: Annotated[str, Field(max_length=4096)] = ""
    """The end of its log, without secrets."""
    stacks: Annotated[str, Field(max_length=4096)] = ""
    """The beginning of the stacks of its threads, if it hung or a signal killed it."""
    path: Annotated[str, Field(max_length=1024)] = ""
    """Directory in worker pods with more of both, on the checkpoint claim."""


MAX_SUSPECT_NODES = 16


class SuspectNode(ApiModel):
    """A node on which workers of this job have failed, with `recovery.suspectNodes`."""

    node: Annotated[str, Field(max_length=253)]
    """Name of the node."""
    worker: Count
    """The worker that failed last."""
    failures: Count
    """Failures within the window."""
    cause: Annotated[str, Field(max_length=64)]
    """Cause of the last one, as in `mesh.cause`."""
    last_failure: Time
    """When it was detected."""
    avoided_until: Time | None = None
    """Until when the job avoids the node. None if it was never suspect, or was cleared."""


class SlowRank(ApiModel):
    """A rank that computes longer than its peers, the ranks of the same pipeline stage: all others wait for it."""

    rank: Count
    """The rank."""
    worker: Count
    """Its worker."""
    node: Annotated[str, Field(max_length=253)] = ""
    """The node of the worker."""
    generation: Count
    """The mesh generation."""
    since: Time
    """When it was first seen to be slow."""
    confirmed: bool = False
    """Whether it has been slow for so long that the event `SlowRank` was posted."""


class LimitKind(StrEnum):
    """What the time of a step depends on most."""

    COMPUTE = "Compute"
    DATA = "Data"
    RANK = "Rank"
    COMMUNICATION = "Communication"
    PIPELINE = "Pipeline"


class StepLimit(ApiModel):
    """What limits the time of a step: what to look at first to make steps faster."""

    kind: LimitKind
    """`Data`: ranks wait for samples. `Rank`: one rank computes longer than its peers. `Communication`: ranks wait for
    collectives of one dimension. `Pipeline`: ranks wait for other stages. `Compute`: none of these."""
    percent: Annotated[int, Field(ge=0, le=100)]
    """Its part of a step, in steps of 5%."""
    dimension: Annotated[str, Field(max_length=16)] = ""
    """The dimension of `Communication`: `tensor`, `context`, `expert` or `data`."""
    rank: Count | None = None
    """The rank of `Rank`, or the one that waits longest for `Data` or `Communication`."""
    stage: Count | None = None
    """The stage with the longest passes, for `Pipeline`."""


class ParallelTrainingJobStatus(ApiModel):
    """Observed state of the job."""

    observed_generation: Annotated[int, Field(ge=-1, le=MAX_SAFE_INTEGER)] = -1
    """The `metadata.generation` that the operator has acted on, or -1 before the first time."""
    conditions: Annotated[
        list[Condition], Field(max_length=MAX_CONDITIONS, json_schema_extra={"x-list-map-key": "type"})
    ] = []
    """Ready, Reconciling, Stalled, Placed, Complete, Failed, Suspended; with `elastic` also Rescaling, and
    PreflightPassed once pods are checked, and CheckpointHealthy once a checkpoint was not saved."""
    plan: PlanStatus | None = None
    """The effective layout."""
    placement: PlacementStatus | None = None
    """Where the workers run."""
    mesh: MeshStatus | None = None
    """The current mesh generation."""
    elastic: ElasticStatus | None = None
    """The size of an elastic job, and the workers that join it."""
    ready_ranks: Annotated[str, Field(max_length=32)] = ""
    """Number of ranks that train and number of all ranks, such as `8/8`."""
    step: Count | None = None
    """Last completed step."""
    total_steps: Count | None = None
    """Number of steps of the run."""
    loss: Annotated[str, Field(max_length=32)] = ""
    """Mean loss per token of the last reported step."""
    tokens_per_second: Count | None = None
    """Recent throughput of the job."""
    eta_seconds: Count | None = None
    """Estimated time to the last step."""
    evaluation: EvaluationStatus | None = None
    """Latest evaluation, with `training.evaluation`."""
    checkpoint: CheckpointStatus | None = None
    """Latest durable checkpoint."""
    resumed_from: ResumedFromStatus | None = None
    """With `checkpoint.resumeFrom`: the checkpoint that training began from. Not set before."""
    checkpoint_tiers: (
        Annotated[
            list[CheckpointTierStatus],
            Field(max_length=MAX_CHECKPOINT_TIERS, json_schema_extra={"x-list-map-key": "place"}),
        ]
        | None
    ) = None
    """Where checkpoints are saved, while ranks of Meshwright's runtime train."""
    checkpoint_request: CheckpointRequestStatus | None = None
    """The last request for a checkpoint. Not set before the first."""
    goodput: GoodputStatus | None = None
    """What the time of the job was spent on."""
    restarts: Annotated[
        list[RestartStatus], Field(max_length=MAX_RESTART_CAUSES, json_schema_extra={"x-list-map-key": "cause"})
    ] = []
    """Restarts by cause."""
    suspect_nodes: (
        Annotated[list[SuspectNode], Field(max_length=MAX_SUSPECT_NODES, json_schema_extra={"x-list-map-key": "node"})]
        | None
    ) = None
    """Nodes on which workers have failed, the latest last, with `recovery.suspectNodes`."""
    limit: StepLimit | None = None
    """What limits the time of recent steps, while ranks of Meshwright's runtime train."""
    slow_rank: SlowRank | None = None
    """The slowest rank, while it computes much longer than its peers."""
    last_failure: FailureStatus | None = None
    """The latest failure of a rank, hang or crash of a worker."""
    restart_count: Count = 0
    """Restarts of all causes."""
    restarts_toward_limit: Count = 0
    """Restarts that count toward `spec.recovery.maxRestarts`."""
    restart_times: Annotated[list[Time], Field(max_length=MAX_RESTART_TIMES)] = []
    """Times of the restarts in the window `spec.recovery.restartWindowSeconds`, if it is set."""
    applied_spec: Annotated[str, Field(max_length=MAX_APPLIED_SPEC)] = ""
    """The spec that the workers run, as JSON with its API version, the scheme of its revision and its defaults. It
    stays in effect while an edit is invalid or does not fit."""
    applied_profile: Annotated[str, Field(max_length=MAX_APPLIED_PROFILE)] | None = None
    """With `spec.workers.profile`: the profile that the pods use, as JSON with the operator's seal. It stays in effect
    while the pods do, whatever the administrator changes."""
    waiting_edit: WaitingEditStatus | None = None
    """The edit that waits, with `spec.updatePolicy`."""
    replicas: Count = 0
    """Data-parallel replicas in effect."""
    selector: Annotated[str, Field(max_length=512)] = ""
    """Label selector of the worker pods, as a string."""
    start_time: Time | None = None
    """When the job's pods were first created."""
    active_seconds: Count = 0
    """Unsuspended time before `activeSince`. Counts toward `spec.activeDeadlineSeconds`."""
    active_since: Time | None = None
    """Time since which the job has not been suspended."""
    completion_time: Time | None = None
    """When the job completed or failed."""
