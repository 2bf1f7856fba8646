"""`spec` of a ParallelTrainingJob. It only has fields whose behavior is implemented."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, PrivateAttr, field_validator

from meshwright.api.base import ApiModel, ShortText
from meshwright.api.checkpoint import CheckpointSpec
from meshwright.api.data import DataSpec
from meshwright.api.data_parallel import Degree
from meshwright.api.elastic import ElasticSpec
from meshwright.api.model import ModelSpec
from meshwright.api.parallelism import ParallelismSpec
from meshwright.api.preflight import PreflightSpec
from meshwright.api.progress_patterns import pattern_problem
from meshwright.api.topology import TopologySpec
from meshwright.api.training import TrainingSpec
from meshwright.api.workers import WorkersSpec

MANAGER_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"


class ProgressSpec(ApiModel):
    """How the progress of a `runtime.command` is read. Without it, common lines of its log are recognized. A command
    that writes to the file in MESHWRIGHT_REPORT_FILE needs no patterns.
    """

    patterns: Annotated[list[Annotated[str, Field(min_length=1, max_length=512)]], Field(max_length=8)] | None = None
    """Regular expressions, searched in each line of rank 0's log without regard to case. Named groups say what they
    find: `step`, `loss`, `tokens`, `learning_rate`, `total_steps`, `epoch`. They replace those for common lines and of
    `framework`; an empty list turns the search off."""
    total_steps: Annotated[int, Field(ge=1, le=1000000000000)] | None = None
    """Steps of the run, for the estimated time that is left, if the command does not report it."""

    @field_validator("patterns")
    @classmethod
    def _check_patterns(cls, patterns: list[str] | None) -> list[str] | None:
        for index, pattern in enumerate(patterns or ()):
            if problem := pattern_problem(pattern):
                raise ValueError(f"pattern {index} (`{pattern}`) {problem}")
        return patterns


class Framework(StrEnum):
    """What a command starts: a framework whose flags a plan is written in, or replica groups of torchft."""

    MEGATRON_LM = "MegatronLM"
    TORCH_TITAN = "TorchTitan"
    DEEP_SPEED = "DeepSpeed"
    TORCH_FT = "TorchFT"


class AgentSource(StrEnum):
    """Where a worker pod's agent comes from."""

    IMAGE = "Image"
    INJECTED = "Injected"


class RuntimeSpec(ApiModel):
    """What the ranks run: Meshwright's own runtime, or the user's command."""

    command: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(min_length=1, max_length=64)] | None = None
    """A torchrun-style command, started once per rank with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and
    the rank's mesh coordinates in its environment. Exit code 0 means that the run is complete, 143 after SIGTERM that
    it can be resumed, any other code is a failure. Excludes `model`, `data` and `training`, unless `framework` is
    set."""
    framework: Framework | None = None
    """What `command` starts. Experimental. `TorchFT`: each worker, or as many as the degrees need, is a replica group
    with its own world; only groups that lose ranks restart. Others need `model` and `training`: the planner chooses the
    layout with the framework's memory and techniques, and appends its flags to `command`, which names data and
    tokenizer. `MegatronLM`: flags of `pretrain_gpt.py`. `TorchTitan`: of `torchtitan.train`. `DeepSpeed`:
    `--deepspeed_config`."""
    scripts: ShortText | None = None
    """ConfigMap whose keys are mounted as files under `/meshwright/scripts`, for use in `command`."""
    progress: ProgressSpec | None = None
    """How step and loss are found in the log of `command`."""
    agent: AgentSource | None = None
    """`Image` (default): `workers.image` contains the agent. `Injected`: an init container adds it to any image. Needs
    `command`."""

    @property
    def planned(self) -> bool:
        """Whether the planner chooses the layout for the command, in the framework's flags."""
        return self.framework is not None and not self.has_replica_groups

    @property
    def has_replica_groups(self) -> bool:
        """Whether ranks form replica groups of torchft instead of one world."""
        return self.framework is Framework.TORCH_FT

    @property
    def injects_agent(self) -> bool:
        """Whether an init container brings the agent."""
        return self.agent is AgentSource.INJECTED


class CordonedNodes(StrEnum):
    """What workers do when their node does not accept new pods."""

    MOVE = "Move"
    STAY = "Stay"


ExitCode = Annotated[int, Field(ge=1, le=255)]


class FailureAction(StrEnum):
    """What a failure leads to."""

    FAIL_JOB = "FailJob"
    """The job fails at once, because a retry would not help."""
    IGNORE = "Ignore"
    """The run restarts, and the restart does not count toward `recovery.maxRestarts`."""
    COUNT = "Count"
    """The run restarts, and the restart counts, as without a rule."""


class ExitCodeRule(ApiModel):
    """What to do if the process of a rank or worker exits with one of these codes."""

    values: Annotated[list[ExitCode], Field(min_length=1, max_length=64)]
    """Exit codes. A process killed by a signal has 128 plus the signal's number, so 137 for out of memory."""
    action: FailureAction
    """`FailJob`: fail the job at once. `Ignore`: restart without counting. `Count`: restart and count."""


class SuspectNodesSpec(ApiModel):
    """When a node is suspect, because workers fail on it again and again, and for how long the job avoids it."""

    failures: Annotated[int, Field(ge=1, le=100)] = 2
    """Failures on a node after which its workers move to other nodes: failed or hung ranks, crashed pods and losses of
    the node. After fewer, ranks restart in the same pods. If a worker fails on other nodes too, none is suspect."""
    window_seconds: Annotated[int, Field(ge=60, le=2592000)] = 3600
    """Time in which they count, from one failure to the next."""
    avoid_seconds: Annotated[int, Field(ge=60, le=2592000)] = 86400
    """Time for which the job avoids a suspect node. A node that fails later is avoided again after one failure. A job
    that has waited for nodes for two minutes uses suspect ones too."""
    check_nodes: bool | None = None
    """Experimental, off by default. Whether ranks check all nodes before they start on one with a recent failure:
    matrix products, and all-gathers between pairs of workers. A node that fails the check is suspect at once."""


class ReplicaLossAction(StrEnum):
    """What the other replicas do when one is lost."""

    WAIT = "Wait"
    CONTINUE = "Continue"


class RecoverySpec(ApiModel):
    """What to do when ranks fail."""

    max_restarts: Annotated[int, Field(ge=0, le=1000000)] = 10
    """Number of restarts after failures of the job's processes before the job fails. Lost and deleted pods do not
    count."""
    hang_timeout_seconds: Annotated[int, Field(ge=1, le=604800)] | None = None
    """Time without a completed step after which a rank counts as hanging: all ranks are killed and restarted. Defaults
    to ten times the recent step time, and at least 300 seconds; before the first step it is at least 900 seconds. A
    `runtime.command` reports its steps in MESHWRIGHT_REPORT_FILE. For one that does not, it is the time in which no
    rank writes to its standard output or error, without a default."""
    cordoned_nodes: CordonedNodes = CordonedNodes.MOVE
    """What happens to workers on a node that is cordoned, or has a taint that they do not tolerate. `Move`: they save a
    checkpoint and move as soon as they fit on another node. `Stay`: they keep running until they are evicted."""
    spare_nodes: Annotated[int, Field(ge=0, le=64)] = 0
    """Number of nodes to reserve for replacements while the job runs, close to the workers that they would replace; at
    most one for each worker. Other jobs of this operator do not get them. `status.placement.spares` lists them. An edit
    takes effect at the next placement."""
    restart_window_seconds: Annotated[int, Field(ge=60, le=2592000)] | None = None
    """Time window in which restarts count toward `maxRestarts`, which may then be at most 100. Defaults to the whole
    run."""
    unbound_seconds: Annotated[int, Field(ge=0, le=31536000)] | None = None
    """With `workers.schedulerName`: time in which that scheduler must bind the first pod, before the pods are deleted
    and created again later. 0 means no limit. Defaults to the operator's setting, 1800. Time with a scheduling gate of
    another controller does not count."""
    partly_bound_seconds: Annotated[int, Field(ge=0, le=31536000)] | None = None
    """The same for the other pods, after the first one was bound. 0 means no limit. Defaults to the operator's setting,
    300."""
    in_memory: bool | None = None
    """Experimental, for ranks without GPUs. When ranks are lost, the others keep their processes and state, and new
    ranks get theirs from a rank that has the same, not from the checkpoint. If none has, all ranks restart from the
    checkpoint, and an event says why. An edit takes effect when the next mesh generation starts."""
    copy_every_steps: Annotated[int, Field(ge=1, le=1000000)] | None = None
    """With `inMemory`: steps between two copies of each rank's state in its own and a peer's host memory. Needed if no
    rank has the same state as another. `status.mesh.copies` says which losses they survive."""
    on_replica_loss: ReplicaLossAction | None = None
    """Experimental, with `inMemory` and `elastic`. `Continue`: the other replicas train on at the next step, and the
    lost one joins again once its pods are back; no rank restarts. Defaults to `Wait`."""
    suspect_nodes: SuspectNodesSpec | None = None
    """Avoid nodes on which workers fail again and again. By default ranks restart in the same pods after every failure.
    Not allowed with `workers.schedulerName`."""
    exit_codes: Annotated[list[ExitCodeRule], Field(max_length=20)] = []
    """Meaning of exit codes of ranks and workers. The first rule that contains the code applies. Other codes count
    toward `maxRestarts`."""


class SuccessPolicy(StrEnum):
    """When a run is complete."""

    ALL_WORKERS = "AllWorkers"
    FIRST_WORKER = "FirstWorker"


class UpdatePolicy(StrEnum):
    """When an edit that restarts the gang takes effect."""

    NOW = "Now"
    AT_CHECKPOINT = "AtCheckpoint"
    ON_RESTART = "OnRestart"


class ParallelTrainingJobSpec(ApiModel):
    """What to train, how to split it, and the pods that it runs in."""

    replicas: Degree = 1
    """Data-parallel replicas of the model. Must be 1 with `gpus`. With `elastic`, the wanted number: `status.replicas`
    has the current one."""
    elastic: ElasticSpec | None = None
    """How the number of replicas follows the cluster. Without it, the job always runs with `replicas`."""
    gpus: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Largest number of GPUs to train on, instead of `replicas`. The planner chooses every degree that is left out for
    the shortest step, also the number of replicas. If it uses fewer, `status.plan.reasons` says why. The number does
    not depend on how many GPUs are free."""
    model: ModelSpec | None = None
    """The model. Required unless `runtime.command` is set."""
    data: DataSpec | None = None
    """The training data. Required unless `runtime.command` is set."""
    training: TrainingSpec | None = None
    """Length, batch, precision and optimizer. Required unless `runtime.command` is set."""
    parallelism: ParallelismSpec = ParallelismSpec()
    """How one replica is split over GPUs."""
    topology: TopologySpec | None = None
    """Levels of the fabric that groups of ranks must not, or should not, leave."""
    workers: WorkersSpec
    """The worker pods."""
    runtime: RuntimeSpec = RuntimeSpec()
    """What the ranks run."""
    checkpoint: CheckpointSpec | None = None
    """Checkpoints. Without them a restarted run starts at step 0."""
    recovery: RecoverySpec = RecoverySpec()
    """What to do when ranks fail."""
    preflight: PreflightSpec | None = None
    """Checks of the worker pods before ranks start. By default, findings are reported and prevent nothing."""
    success_policy: SuccessPolicy = SuccessPolicy.ALL_WORKERS
    """`AllWorkers`: the job is complete when every worker has exited with code 0. `FirstWorker`: when the worker of
    rank 0 has; the others are then stopped. `FirstWorker` needs `runtime.command`."""
    priority: Annotated[int, Field(ge=-1000000000, le=1000000000)] = 0
    """Priority in the queue of waiting jobs: higher first. The administrator's policy may bound it. Elastic jobs give
    up replicas above their minimum to jobs of higher priority. No other running job is stopped, unless it is
    `preemptible`."""
    preemptible: bool = False
    """Whether the job may be stopped for a job of higher priority that waits. It saves a checkpoint first, is queued
    again, and resumes when nodes are free."""
    update_policy: UpdatePolicy = UpdatePolicy.NOW
    """When an edit that restarts the gang takes effect while the ranks train. `Now`: at once, from a checkpoint that is
    saved first. `AtCheckpoint`: after the next periodic checkpoint. `OnRestart`: when the ranks restart for another
    reason. `status.waitingEdit` says that an edit waits."""
    suspend: bool = False
    """Whether the job is suspended: its pods are deleted. When this is set to false, it resumes from the latest
    checkpoint."""
    active_deadline_seconds: Annotated[int, Field(ge=1, le=2147483647)] | None = None
    """Time after the first start, without suspended time, after which the job fails."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=2147483647)] | None = None
    """Time after which a finished job is deleted. By default it is not deleted."""
    priority_class_name: ShortText | None = None
    """PriorityClass of the pods. Defaults to that of the cluster."""
    managed_by: Annotated[str, Field(min_length=3, max_length=63, pattern=MANAGER_PATTERN)] | None = None
    """The controller that manages this job, as `domain/name`. This operator ignores the job if the value is not
    `meshwright.dev/operator`. Immutable."""

    _claimed_channel: bool = PrivateAttr(default=False)
    _claimed_gpus: bool = PrivateAttr(default=False)

    @property
    def joins_hosts(self) -> bool:
        """Whether the operator makes a ComputeDomain, whose IMEX channel joins the GPUs of several nodes."""
        return self.topology is not None and bool(self.topology.multi_node_nvlink)

    @property
    def has_channel(self) -> bool:
        """Whether each pod has an IMEX channel, of the operator's ComputeDomain or by a claim of the job."""
        return self.joins_hosts or self._claimed_channel

    @property
    def joins_pods(self) -> bool:
        """Whether a claim joins the pods of one host, so that NVLink connects their GPUs."""
        return self.has_channel or self._claimed_gpus

    def joined_by_claims(self, *, channel: bool, pods: bool) -> Self:
        """The spec of a job whose claims are known. See `with_claims` in `meshwright.devices.job_claims`."""
        found = self.model_copy()
        found._claimed_channel, found._claimed_gpus = channel, pods  # noqa: SLF001 - a copy of this object
        return found
