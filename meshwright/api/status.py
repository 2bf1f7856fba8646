"""`status` of a ParallelTrainingJob: what the operator observed and decided. Nobody else writes it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from meshwright.api.base import ApiModel
from meshwright.api.parallelism import PipelineSchedule
from meshwright.api.training import ActivationCheckpointing

Text = Annotated[str, Field(max_length=1024)]
Time = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
MAX_SAFE_INTEGER = (1 << 53) - 1
"""The largest integer that every JSON reader keeps exactly."""
Count = Annotated[int, Field(ge=0, le=MAX_SAFE_INTEGER)]

MAX_APPLIED_SPEC = 131072
MAX_RESTART_TIMES = 128


class Condition(ApiModel):
    """A condition in the form of `metav1.Condition`."""

    type: Annotated[str, Field(min_length=1, max_length=316)]
    """Name of the condition."""
    status: Annotated[str, Field(pattern="^(True|False|Unknown)$", max_length=7)]
    """True, False or Unknown."""
    observed_generation: Count | None = None
    """The `metadata.generation` this condition speaks of."""
    last_transition_time: Time
    """When `status` last changed."""
    reason: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    """Why, in one CamelCase word."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """Why, for people."""


class PlanStatus(ApiModel):
    """The layout in effect, and why."""

    tensor: Count
    """Tensor-parallel degree."""
    pipeline: Count
    """Pipeline-parallel degree."""
    data: Count
    """Data-parallel degree."""
    context: Count = 1
    """Context-parallel degree."""
    expert: Annotated[int, Field(ge=1, le=65536)] = 1
    """Expert-parallel degree: over how many of the ranks with the same dense parameters experts are spread."""
    micro_batches: Count
    """Micro-batches per replica and step."""
    schedule: PipelineSchedule | None = None
    """Order in which a pipeline runs them; none without a pipeline."""
    activation_checkpointing: ActivationCheckpointing | None = None
    """What the backward pass computes again; none for a command of the user's."""
    world_size: Count
    """Number of ranks."""
    workers: Count
    """Number of worker pods."""
    memory_per_rank_bytes: Count | None = None
    """Estimated peak memory of the fullest rank."""
    parameters: Count | None = None
    """Parameters of the model."""
    estimated_step_milliseconds: Count | None = None
    """Estimated time of one step, when model and GPUs are known."""
    estimated_tokens_per_second: Count | None = None
    """Estimated throughput of the whole job."""
    summary: Text = ""
    """The layout in one line, such as `TP 2 x PP 2 x DP 2`."""
    reasons: Annotated[list[Text], Field(max_length=16)] = []
    """Why each degree was chosen."""
    revision: Annotated[str, Field(max_length=64)] = ""
    """Hash of the parts of `spec` that the plan and the pods were made from; another one restarts the workers."""


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


class PlacementStatus(ApiModel):
    """Where every worker runs or ran last, and what the choice costs."""

    workers: Annotated[
        list[WorkerPlacement], Field(max_length=1024, json_schema_extra={"x-list-map-key": "worker"})
    ] = []
    """Worker by worker."""
    tensor: Count = 0
    """Tensor-parallel degree of the plan that was placed."""
    pipeline: Count = 0
    """Pipeline-parallel degree of the plan that was placed."""
    data: Count = 0
    """Replicas of the plan that was placed."""
    cost: Annotated[str, Field(max_length=64)] = ""
    """Cost of the placement, lower is better, 0 crosses nothing: milliseconds per step that crossing domains, racks and
    zones is estimated to add, summed over all groups of ranks; a relative number where model or GPUs are not known."""
    gap: Annotated[str, Field(max_length=64)] = ""
    """Part of the cost that the best placement on the same free nodes, or the best map of ranks onto the nodes that
    another scheduler gave, might save at most; 0 is proved best."""
    straddling_tensor_groups: Count = 0
    """Tensor-parallel groups that leave their NVLink domain."""
    straddling_replicas: Count = 0
    """Replicas whose pipeline leaves its rack."""
    spares: Annotated[list[Annotated[str, Field(max_length=253)]], Field(max_length=64)] = []
    """Nodes kept free for workers that are lost, the most useful first."""


class MeshStatus(ApiModel):
    """The mesh generation: a new one each time the set of worker processes changes."""

    generation: Count = 0
    """Number of the generation; 0 before the first start."""
    master: Annotated[str, Field(max_length=128)] = ""
    """`address:port` of rank 0's rendezvous store."""
    started_time: Time | None = None
    """When this generation was announced."""
    cause: Annotated[str, Field(max_length=128)] = ""
    """Why it was formed: `Start`, `PodLost`, `RankFailure`, `Resume` and the like."""
    pending_cause: Annotated[str, Field(max_length=128)] = ""
    """Why this generation is over and the next one is being formed; empty while it holds."""
    pending_since: Time | None = None
    """Since when the next generation is being formed."""
    attempts: Count = 0
    """Starts of the gang given up since it last ran: pods were refused, or did not start in time."""
    retry_time: Time | None = None
    """When the gang is tried again after such a start."""
    failures: Count = 0
    """Failures of the job's own in a row, counted toward `recovery.maxRestarts` or not: the more, the longer the pause
    before the next start. Ten minutes of training end the row."""


class EvaluationStatus(ApiModel):
    """The newest evaluation on documents that are never trained on."""

    step: Count
    """Step after which it was done."""
    loss: Annotated[str, Field(max_length=32)]
    """Mean loss per token."""
    perplexity: Annotated[str, Field(max_length=32)]
    """Exponential of the loss; `inf` where that is more than a number holds."""


class CheckpointStatus(ApiModel):
    """The newest durable checkpoint."""

    step: Count
    """Step after which it was taken."""
    time: Time
    """When it became complete."""
    path: Annotated[str, Field(max_length=1024)]
    """Where it is, as the workers see it."""


class RestartStatus(ApiModel):
    """Restarts of one cause."""

    cause: Annotated[str, Field(min_length=1, max_length=64)]
    """The cause, as in `mesh.cause`."""
    count: Count
    """How often."""


class ParallelTrainingJobStatus(ApiModel):
    """Observed state of the job."""

    observed_generation: Annotated[int, Field(ge=-1, le=MAX_SAFE_INTEGER)] = -1
    """The `metadata.generation` that the operator has acted on; -1 before it has seen the job."""
    conditions: Annotated[list[Condition], Field(max_length=16, json_schema_extra={"x-list-map-key": "type"})] = []
    """Ready, Reconciling, Stalled, Placed, Complete, Failed, Suspended."""
    plan: PlanStatus | None = None
    """The effective layout."""
    placement: PlacementStatus | None = None
    """Where the workers run."""
    mesh: MeshStatus | None = None
    """The current mesh generation."""
    ready_ranks: Annotated[str, Field(max_length=32)] = ""
    """Ranks that train, of all ranks, such as `8/8`."""
    step: Count | None = None
    """Last finished step."""
    total_steps: Count | None = None
    """Steps of the whole run."""
    loss: Annotated[str, Field(max_length=32)] = ""
    """Mean loss per token of the last reported step."""
    tokens_per_second: Count | None = None
    """Recent throughput of the whole job."""
    eta_seconds: Count | None = None
    """Estimated time to the last step."""
    evaluation: EvaluationStatus | None = None
    """Newest evaluation, with `training.evaluation`."""
    checkpoint: CheckpointStatus | None = None
    """Newest durable checkpoint."""
    restarts: Annotated[list[RestartStatus], Field(max_length=16, json_schema_extra={"x-list-map-key": "cause"})] = []
    """Restarts by cause."""
    restart_count: Count = 0
    """Restarts of all causes."""
    restarts_toward_limit: Count = 0
    """Restarts that count toward `spec.recovery.maxRestarts`."""
    restart_times: Annotated[list[Time], Field(max_length=MAX_RESTART_TIMES)] = []
    """When they happened, with `spec.recovery.restartWindowSeconds`: those of the window."""
    applied_spec: Annotated[str, Field(max_length=MAX_APPLIED_SPEC)] = ""
    """The spec, as JSON, that the workers were made from: in effect while an edit is invalid or has no room."""
    replicas: Count = 0
    """Data-parallel replicas in effect."""
    selector: Annotated[str, Field(max_length=512)] = ""
    """Label selector of the worker pods, as text."""
    start_time: Time | None = None
    """When the job's pods were first created."""
    active_seconds: Count = 0
    """Time spent unsuspended before `activeSince`; counts toward `spec.activeDeadlineSeconds`."""
    active_since: Time | None = None
    """Since when the job has been unsuspended."""
    completion_time: Time | None = None
    """When the job finished, well or badly."""
