"""`spec` of a ParallelTrainingJob. A field stands here only when its behaviour does."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from meshwright.api.base import ApiModel
from meshwright.api.data import DataSpec
from meshwright.api.data_parallel import Degree
from meshwright.api.failure_policy import ExitCodeRule
from meshwright.api.field_types import ShortText
from meshwright.api.model import ModelSpec
from meshwright.api.parallelism import ParallelismSpec
from meshwright.api.training import TrainingSpec
from meshwright.api.workers import WorkersSpec

MANAGER_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"


class RuntimeSpec(ApiModel):
    """What the ranks run: Meshwright's own runtime, or the user's command."""

    command: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(min_length=1, max_length=64)] | None = None
    """A torchrun-style command, started once per rank with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and
    the rank's mesh coordinates in its environment. Exit code 0 ends the run, 143 after SIGTERM asks to be run again,
    any other is a failure. Excludes `model`, `data` and `training`."""
    scripts: ShortText | None = None
    """ConfigMap whose keys are mounted as files under `/meshwright/scripts`; `command` may name them there."""


DEFAULT_CHECKPOINT_INTERVAL = 100
"""Steps between checkpoints where `checkpoint.everySteps` is left out."""


class CheckpointSpec(ApiModel):
    """Where and how often the state of training is saved."""

    claim_name: ShortText
    """PersistentVolumeClaim, writable from every node that runs workers (ReadWriteMany), for this job's checkpoints."""
    every_steps: Annotated[int, Field(ge=1, le=1000000000)] | None = None
    """Steps between checkpoints of Meshwright's own runtime; 100 when left out. Not allowed with `runtime.command`."""
    keep: Annotated[int, Field(ge=1, le=10000)] | None = None
    """Newest complete checkpoints to keep; 2 when left out. Not allowed with `runtime.command`."""

    @property
    def interval(self) -> int:
        """Steps between checkpoints. No default stands in the schema: with a command the field must be absent."""
        return DEFAULT_CHECKPOINT_INTERVAL if self.every_steps is None else self.every_steps

    @property
    def retained(self) -> int:
        """How many complete checkpoints are kept."""
        return 2 if self.keep is None else self.keep


class CordonedNodes(StrEnum):
    """What workers do when their node takes nothing new."""

    MOVE = "Move"
    STAY = "Stay"


class RecoverySpec(ApiModel):
    """What to do when ranks fail."""

    max_restarts: Annotated[int, Field(ge=0, le=1000000)] = 10
    """Restarts after failures of the job's own processes before the job fails. Lost or deleted pods do not count."""
    hang_timeout_seconds: Annotated[int, Field(ge=1, le=604800)] | None = None
    """How long a rank of Meshwright's own runtime may live without finishing a step before all ranks are killed and
    started again. When left out: ten times the recent time of a step, and at least 300 seconds. Until the first step
    of a generation it is never less than 900 seconds."""
    cordoned_nodes: CordonedNodes = CordonedNodes.MOVE
    """What becomes of workers on a node that is cordoned or got a taint that they do not tolerate. `Move`: they save a
    checkpoint and move, once there is room for them elsewhere. `Stay`: they run on until somebody evicts them."""
    spare_nodes: Annotated[int, Field(ge=0, le=64)] = 0
    """Nodes to keep free of this operator's other jobs while the job runs, near the workers that they would replace:
    `status.placement.spares` names them. As many as are free when workers are placed; a raised number takes effect when
    workers are placed next. Pods of others are not kept off."""
    restart_window_seconds: Annotated[int, Field(ge=60, le=2592000)] | None = None
    """Only restarts of the last so many seconds count toward `maxRestarts`, which may then be at most 100; all of them
    when left out."""
    exit_codes: Annotated[list[ExitCodeRule], Field(max_length=20)] = []
    """What an exit code of a rank or worker means; the first rule that names the code decides. A code that no rule
    names counts toward `maxRestarts`."""


class SuccessPolicy(StrEnum):
    """When a run is over and well."""

    ALL_WORKERS = "AllWorkers"
    FIRST_WORKER = "FirstWorker"


class ParallelTrainingJobSpec(ApiModel):
    """What to train, how to split it and what it runs on."""

    replicas: Degree = 1
    """Data-parallel replicas of the model."""
    model: ModelSpec | None = None
    """The model. Required unless `runtime.command` is set."""
    data: DataSpec | None = None
    """The training data. Required unless `runtime.command` is set."""
    training: TrainingSpec | None = None
    """Length, batch, precision and optimizer. Required unless `runtime.command` is set."""
    parallelism: ParallelismSpec = ParallelismSpec()
    """How one replica is split over GPUs."""
    workers: WorkersSpec
    """The worker pods."""
    runtime: RuntimeSpec = RuntimeSpec()
    """What the ranks run."""
    checkpoint: CheckpointSpec | None = None
    """Checkpoints; without it a restarted run begins at step 0."""
    recovery: RecoverySpec = RecoverySpec()
    """What to do when ranks fail."""
    success_policy: SuccessPolicy = SuccessPolicy.ALL_WORKERS
    """`AllWorkers`: the job is complete when every worker has ended well. `FirstWorker`: when the one of rank 0
    has, and the others are then stopped; it needs `runtime.command`."""
    priority: Annotated[int, Field(ge=-1000000000, le=1000000000)] = 0
    """Place in the line of jobs that wait for room: higher first, then older. A running job is never stopped for it."""
    suspend: bool = False
    """Whether the job gives its pods back and waits; when false again it goes on from the last checkpoint."""
    active_deadline_seconds: Annotated[int, Field(ge=1, le=2147483647)] | None = None
    """Longest time from the first start to the end, suspended time not counted; then the job fails."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=2147483647)] | None = None
    """How long a finished job is kept before it is deleted; for ever when left out."""
    priority_class_name: ShortText | None = None
    """PriorityClass of the pods; the cluster's default when left out."""
    managed_by: Annotated[str, Field(min_length=3, max_length=63, pattern=MANAGER_PATTERN)] | None = None
    """The controller that acts on this job, as `domain/name`; another one than `meshwright.dev/operator` and this
    operator leaves the job alone entirely. It may not be changed."""
