"""The messages between a worker pod's agent and the operator's coordinator.

Messages are JSON over HTTP. docs/protocol.md describes them for people, docs/protocol.schema.json for programs. Every
request is signed with the job's token (`meshwright.protocol.signing`) and names its version. The paths are below
`/v1/jobs/{namespace}/{name}/{uid}`:

    POST .../mesh      MeshRequest  -> 200 MeshDocument | 204 nothing new within `wait_seconds` | 410 superseded
    POST .../report    WorkerReport -> 200 ReportReply  | 410 superseded
    POST .../trust     TrustRequest -> 200 TrustBundle  | 410 superseded

401: not signed with the job's token. 404: no such job. 409: signed for another session of the coordinator, or not the
sender's next request. 410: a newer incarnation of this worker exists, or the job needs no pods; the agent stops its
ranks and exits. 426: the coordinator does not support the agent's version. All other responses are retried, 429 and 503
after `Retry-After`. Training continues while the coordinator is unavailable.

Both sides ignore unknown fields, and read an unknown value as a safe one (`meshwright.protocol.versions`). A run that
an older agent would compute differently has a higher `run_version`: that agent rejects it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field

from meshwright.api.base import ApiModel
from meshwright.api.model_parts import RopeScaling
from meshwright.api.parsing import parse_known_fields
from meshwright.api.training import RateDecay
from meshwright.models.architecture import Architecture
from meshwright.protocol.preflight import PreflightReport
from meshwright.protocol.run_config import NativeRun, RunConfig, RunMessage, UnsupportedRun
from meshwright.protocol.trust import MAX_BUNDLE_BYTES

RUN_VERSION = 4
"""The newest `run_version` that this release executes. Version 2 has replica groups, version 3 has `decay` and
`decaySteps` of the optimizer, version 4 has `initialAdapter` of LoRA, `resumeFrom` and `keepBest` of checkpoints, and
sliding windows shorter than a sequence."""

MAX_GENERATION = 1 << 31
DEFAULT_REPORT_SECONDS = 2.0
"""Interval of reports until the coordinator sets another one."""

Message = TypeVar("Message", bound=ApiModel)

Worker = Annotated[int, Field(ge=0, le=65535)]
"""Index of a worker."""
Incarnation = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]
"""How often a worker's pod was replaced."""
Generation = Annotated[int, Field(ge=0, le=MAX_GENERATION)]
"""Number of a mesh generation."""
PodUid = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9-]+$")]
"""uid of a pod."""
Int64 = Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1)]
"""A number from a user's pod. What it may be is decided where it is used."""


def parse_message(kind: type[Message], body: bytes) -> Message:
    """Parse the message in `body`, and ignore unknown fields.

    Raises:
        ValueError: `body` is not a valid message (pydantic's `ValidationError` is a ValueError).
    """
    return parse_known_fields(kind, json.loads(body))


def parse_mesh_document(body: bytes) -> MeshDocument:
    """Parse a mesh document. A run that this release cannot execute becomes an `UnsupportedRun`.

    Raises:
        ValueError: `body` is not a mesh document.
    """
    raw: Any = json.loads(body)
    if not isinstance(raw, Mapping):
        raise ValueError("a mesh document must be a JSON object")
    version = raw.get("runVersion", 1)
    try:
        if not isinstance(version, int) or version > RUN_VERSION:
            raise ValueError(f"it has version {version}, and this image supports versions up to {RUN_VERSION}")
        run: RunConfig = parse_known_fields(RunMessage, {"run": raw.get("run")}).run
    except ValueError as error:
        reason = " ".join(str(error).split())[:1024]
        text = f"this worker image cannot execute the run: {reason}. Use an image of the operator's release"
        run = UnsupportedRun(reason=text)
    return parse_known_fields(MeshDocument, {**raw, "run": run})


def _known_or(kind: type[StrEnum], safe: StrEnum) -> Callable[[Any], Any]:
    """A validator that reads values which only another version knows as `safe`."""
    values = {member.value for member in kind}
    return lambda value: safe if isinstance(value, str) and value not in values else value


class OpenMessage(ApiModel):
    """A message, or a part of one. Unknown fields are ignored: a newer version may have sent them."""

    model_config = ConfigDict(extra="ignore")


class MeshRequest(OpenMessage):
    """An agent's long poll for a mesh generation that is newer than `generation`."""

    worker: Worker
    """Worker index."""
    incarnation: Incarnation
    """Incarnation of the worker's pod."""
    pod_uid: PodUid
    """uid of the pod."""
    generation: Generation = 0
    """The generation this agent runs or ran last; 0 before its first."""
    address: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[0-9A-Fa-f:.]+$")]
    """IP address of the pod."""
    store_port: Annotated[int, Field(ge=1, le=65535)]
    """Port that this agent reserves for rank 0's store in the next generation."""
    preparing: bool = False
    """Whether the agent still imports the training runtime. It can take part in a generation anyway, but a job that
    trains grows only once its new workers are prepared. Agents before 0.2 never set it."""
    lighthouse_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port on which this agent would run, or runs, torchft's lighthouse. Agents before 0.2 send none."""
    holds_state: bool = False
    """Whether the agent's ranks can hold their state when a generation is interrupted (`MeshDocument.inMemory`): not
    with GPUs. Agents before 0.2 never set it."""
    wait_seconds: Annotated[float, Field(ge=0, le=60)] = 45.0
    """Time for which the coordinator may delay the response."""


class MeshMember(OpenMessage):
    """One worker of a generation."""

    worker: int
    """Worker index."""
    incarnation: int
    """Incarnation."""
    address: str
    """IP address of the pod."""
    first_rank: int
    """Its first rank."""
    ranks: int
    """Number of consecutive ranks of the worker."""


class MemoryRecovery(OpenMessage):
    """How the ranks of a generation go on from the state that ranks of an earlier one hold in memory."""

    generation: Generation
    """The earliest generation since which one of them holds it. Later ones made no step, or all go back before them."""
    step: int
    """The step from which all ranks go on: the newest that any of them has completed."""
    leader: int
    """A rank that has completed it. It tells the others the step's results."""
    ranks: str
    """The ranks that keep their processes and state, as ranges such as `0-2,5`. Each other rank gets its state from
    one of them that has the same."""
    holders: str | None = None
    """If set, all ranks go back to `step` with copies in host memory: those in `ranks` with their own, and each other
    rank with that of a peer, such as `3:1,4:2` for rank 3 from rank 1."""


class MemoryCopies(OpenMessage):
    """Copies of the ranks' state in host memory (`recovery.copyEverySteps`)."""

    every_steps: int
    """Steps between two copies."""
    shift: int
    """Rank r has its copy on rank r + shift, modulo the number of ranks."""


class ReplicaGroup(OpenMessage):
    """A replica group of torchft: a world of its own."""

    master_address: str
    """Address of the pod of its first rank."""
    master_port: int
    """Port of its store there."""
    since: Generation
    """The generation in which its ranks were started. Agents that run them since then let them go on."""


class ReplicaGroups(OpenMessage):
    """The replica groups of a generation, in the order of their ranks."""

    ranks: Annotated[int, Field(ge=1)]
    """Ranks of each group."""
    groups: list[ReplicaGroup]
    """All groups."""
    lighthouse: str = ""
    """`address:port` of the lighthouse, which the agent of rank 0 runs. Empty if `workers.env` names another one."""


class CheckpointCommit(OpenMessage):
    """A checkpoint became complete."""

    step: Int64
    """Step after which it was taken."""
    time: Annotated[str, Field(max_length=64)]
    """When, RFC 3339."""
    path: Annotated[str, Field(max_length=4096)]
    """Its directory, as the workers see it."""


class ResumedFrom(OpenMessage):
    """The checkpoint of another run that the ranks have begun from."""

    step: Int64
    """Its step."""
    path: Annotated[str, Field(max_length=4096)]
    """Its directory, as the workers see it, or its URI."""


class FailureHistory(OpenMessage):
    """The failures of a job when a generation begins, from which `checkpoint.every: Auto` follows."""

    failures: int = 0
    """Restarts because something failed."""
    trained_seconds: float = 0.0
    """Time in which the job was neither queued nor suspended."""
    nodes: int = 1
    """Nodes of the generation."""


class MeshDocument(OpenMessage):
    """A mesh generation: who takes part, where they meet and what they run."""

    generation: int
    """Number of the generation, growing by one."""
    world_size: int
    """Number of ranks."""
    master_address: str
    """Address of rank 0's pod."""
    master_port: int
    """Port of the rendezvous store there."""
    members: list[MeshMember]
    """Every worker, by index."""
    hung_rank: int | None = None
    """The rank of the previous generation that is the likely cause, if that generation hung: agents record the stacks
    of their ranks before they kill them. Operators before 0.2 send none."""
    run_version: Annotated[int, Field(ge=1)] = 1
    """Version of `run`. An agent that supports only earlier versions rejects the run."""
    run: RunConfig
    """What to run."""
    numa_binding: bool | None = None
    """Whether each rank runs only on CPUs of one NUMA node. None is yes. Agents before 0.2 never bind."""
    environment: dict[str, str] | None = None
    """Variables of communication libraries for every rank, such as `NCCL_IB_HCA`. A variable that the pod has already
    stays. Agents before 0.2 ignore it."""
    resume: CheckpointCommit | None = None
    """The newest checkpoint that a user's command has reported. Agents before 0.2 ignore it."""
    replica_groups: ReplicaGroups | None = None
    """The worlds of ranks that do not form one world. A document with groups has `runVersion` 2."""
    max_restarts: int | None = None
    """`recovery.maxRestarts`, which torchrun's variables have, for a user's command. Agents before 0.2 ignore it."""
    in_memory: bool | None = None
    """Whether ranks hold their state when their generation is interrupted, to recover in memory. None is no. Agents
    before 0.2 ignore it: their ranks are started again."""
    node_check: bool | None = None
    """Whether ranks check their nodes before they meet (`recovery.suspectNodes.checkNodes`). None is no. Agents before
    0.2 ignore it."""
    copies: MemoryCopies | None = None
    """With `inMemory`: the copies that ranks make. Without it they make none."""
    memory: MemoryRecovery | None = None
    """How this generation goes on from the state that ranks hold. Without it, every rank starts anew. Only if all
    agents have reported `RankProcess.held`."""
    history: FailureHistory | None = None
    """The job's failures so far, if its checkpoints need them. Agents before 0.2 ignore it."""
    image: Annotated[str, Field(max_length=1024)] | None = None
    """The image of rank 0 with its digest, for the record in checkpoints. None if the kubelet has not reported it.
    Agents before 0.2 ignore it."""


def run_version_of(run: RunConfig, groups: ReplicaGroups | None) -> int:
    """The `run_version` of a run: the lowest that executes it, so that older images do as long as they can."""
    lowest = 1 if groups is None else 2
    if not isinstance(run, NativeRun):
        return lowest
    checkpoint, lora, optimizer = run.checkpoint, run.training.lora, run.training.optimizer
    if lora is not None and lora.initial_adapter is not None:
        return 4
    if checkpoint is not None and (checkpoint.keeps_best or checkpoint.resume_from is not None):
        return 4
    if run.uses_sliding_window or _has_new_parts(run.architecture):
        return 4
    if optimizer.decay_or_default is not RateDecay.COSINE or optimizer.decay_steps:
        return 3
    return lowest


def _has_new_parts(model: Architecture) -> bool:
    """Whether version 0.1 would leave out a part of the model. (Its window may be longer than all sequences.)"""
    linear = model.rope_scaling is not None and model.rope_scaling.kind is RopeScaling.LINEAR
    return linear or bool(model.window_rope_theta) or model.output_norms or model.embedding_factor != 1


class AgentState(StrEnum):
    """What an agent does with its ranks."""

    IDLE = "Idle"
    """No ranks run: before the first generation, or paused at a step because a peer drains."""
    STARTING = "Starting"
    """Ranks are forked and meet, build or load."""
    RUNNING = "Running"
    """Every local rank has begun to train."""
    FAILED = "Failed"
    """A local rank failed; all local ranks are stopped."""
    DRAINING = "Draining"
    """The pod is going away: ranks save a checkpoint and stop."""
    COMPLETE = "Complete"
    """Every local rank finished the run."""


class FailureKind(StrEnum):
    """The kind of a rank's failure, as far as its agent can tell."""

    PEER_LOST = "PeerLost"
    """A connection to another rank broke: the cause is elsewhere."""
    ERROR = "Error"
    """The rank itself raised, was killed or exited with a code."""
    REJECTED = "Rejected"
    """The rank rejected the run before it contacted any other rank, because this runtime or GPU cannot execute it as it
    is written. Another attempt would end the same way."""
    INVALID_INPUT = "InvalidInput"
    """Data, tokenizer, initial weights, the checkpoint of another run or the command cannot be used as they are. Found
    at a start, before the first step. Another attempt would end the same way until somebody changes them or the spec.
    Agents before 0.2 report `Error`."""
    CHECKPOINT_INCOMPATIBLE = "CheckpointIncompatible"
    """The latest checkpoint is intact, but of another version, model or stream of samples. Another attempt would end
    the same way."""
    WENT_BACK = "WentBack"
    """Training went back to an older checkpoint because of `training.anomalies`, and needs a new start. Agents before
    0.2 never report it."""
    NODE_FAULT = "NodeFault"
    """The rank's node computes wrong results, far too slowly, or cannot exchange data. Agents before 0.2 never report
    it."""


class HeldCopy(OpenMessage):
    """A complete copy of a rank's state in host memory."""

    rank: Int64
    """Whose state it is: the rank that has it, or a peer."""
    step: Int64
    """The step after which it was made."""


class HeldState(OpenMessage):
    """The training state that a rank's process holds while it waits for the next generation."""

    step: Int64
    """The last step whose update it has made."""
    reduced: Int64 | None = None
    """The next step, if the process has that step's gradients, summed over all replicas."""
    copies: Annotated[list[HeldCopy], Field(max_length=16)] | None = None
    """The copies that it has (`MeshDocument.copies`)."""


class RankWork(OpenMessage):
    """How far a rank is with work that takes long, before its first step."""

    name: Annotated[str, Field(max_length=16)]
    """`list`: the files of the data are listed, and counted. `tokenize`: their bytes become tokens. `verify`: the
    rank's share of the checkpoint's files is verified. `checkpoint`, `weights`, `adapter`: its part of the checkpoint,
    of the initial weights or of the initial adapter is read. `draw`: its part of random weights is drawn."""
    done: Int64
    """Files or bytes that are done."""
    total: Int64 | None = None
    """All of them, if that is known."""
    part: Int64 = 1
    """Number of the corpus, from 1."""
    parts: Int64 = 1
    """Corpora of the job."""
    seconds: float = 0.0
    """Time since this work on this corpus began."""


class RankProcess(OpenMessage):
    """One rank's process."""

    rank: Int64
    """Global rank."""
    pid: Int64
    """Process id, as the agent sees it."""
    exit_code: Int64 | None = None
    """Exit code; minus the signal's number when killed; None while it lives."""
    step: Int64 | None = None
    """Last step it finished in this generation; None before the first, and for a user's command that does not report
    its steps in a file."""
    phase: Annotated[str, Field(max_length=32)] = ""
    """Last phase of the start it finished; empty before the first, and for a user's command."""
    idle_seconds: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Time since its last progress: a start, a part of the work before the first step, a completed phase or step, or a
    saved checkpoint. For a user's command without a step, time since it last wrote to its standard output or error."""
    state: Annotated[str, Field(max_length=1)] = ""
    """State letter of the process (proc(5)) if it has been idle for a while, such as `T` for stopped."""
    compute_seconds: float | None = None
    """Recent time for which the rank computes in a step, without waits. Agents before 0.2 send none."""
    held: HeldState | None = None
    """The state that it holds since this generation was interrupted, with `MeshDocument.inMemory`."""
    data_seconds: float | None = None
    """Recent time of a step in which it waits for data. Agents before 0.2 send none."""
    waits: Annotated[dict[Annotated[str, Field(max_length=16)], float], Field(max_length=16)] = {}
    """Dimension of the mesh -> recent seconds of a step in which it waits for communication that no computation hides;
    `job`: for all ranks. Agents before 0.2 send none."""
    work: RankWork | None = None
    """What it is at work on, if it has told how much is done. Agents before 0.2 send none."""


class Progress(OpenMessage):
    """Progress of training, reported by the worker of rank 0."""

    step: Int64
    """Last finished step."""
    loss: float
    """Mean loss per token of that step."""
    tokens_per_second: float = 0.0
    """Recent throughput of the job."""
    step_seconds: float = 0.0
    """Recent mean time of a step."""
    samples: Int64 = 0
    """Sequences consumed since the beginning of the run."""
    checkpoint_stall_seconds: float = 0.0
    """Time that the steps of this generation stood still for checkpoints, all together. Agents before 0.2 send none."""
    total_steps: Int64 | None = None
    """Steps of the run, as a user's command reports them. None for ranks of Meshwright's runtime."""
    has_loss: bool = True
    """Whether `loss` is known: a user's command may report only its steps."""
    mfu: float | None = None
    """Model FLOPs of recent steps over the dense bf16 peak of all GPUs. None if the peak is unknown, and from agents
    before 0.2."""


class Evaluation(OpenMessage):
    """What the last evaluation on documents that are never trained on came to."""

    step: Int64
    """Step after which it was done."""
    loss: float
    """Mean loss per token."""


class CheckpointTier(OpenMessage):
    """One place where checkpoints are saved: a volume or an object store."""

    place: Annotated[str, Field(max_length=1024)]
    """Path, as the workers see it, or URI."""
    every_steps: Int64 | None = None
    """Steps between its checkpoints. None if the interval is a time."""
    interval_seconds: float | None = None
    """Time between its checkpoints. None if that is a number of steps, or not known yet."""
    reason: Annotated[str, Field(max_length=512)] = ""
    """Why that is the interval, with `Auto`."""
    step: Int64 | None = None
    """Step of its newest complete checkpoint."""
    saved_at: float | None = None
    """When that was saved, in seconds since 1970."""
    error: Annotated[str, Field(max_length=1024)] = ""
    """Why the last save failed. Empty if it did not."""
    failing_since: float | None = None
    """Since when saves fail, in seconds since 1970."""
    saving_since: float | None = None
    """Since when a save is in progress, if that delays others, in seconds since 1970."""
    best_step: Int64 | None = None
    """Step of its complete checkpoint with the lowest evaluation loss, with `keepBest`. Agents before 0.2 send none."""
    best_loss: float | None = None
    """That loss."""


class CheckpointAnswer(OpenMessage):
    """What became of a request for a checkpoint."""

    request: Annotated[str, Field(max_length=64)]
    """The request, as `ReportReply.checkpointRequest` names it."""
    step: Int64 | None = None
    """Step after which the checkpoint is taken. None until the ranks have agreed on it."""


class Phase(OpenMessage):
    """Time spent in one phase of starting a generation, such as `spawn`, `rendezvous`, `load`, `first-step`."""

    name: Annotated[str, Field(max_length=32)]
    """Name of the phase."""
    seconds: float
    """How long it took."""


class FailureEvidence(OpenMessage):
    """What a rank that failed, or that was killed because it hung, has left behind. Secrets are masked."""

    generation: Generation
    """Its generation."""
    rank: Int64
    """Its rank."""
    kind: Annotated[str, Field(max_length=32)] = ""
    """A `FailureKind`, or `Hang`."""
    log: Annotated[str, Field(max_length=4096)] = ""
    """The end of its output."""
    stacks: Annotated[str, Field(max_length=4096)] = ""
    """The beginning of the stacks of its threads."""
    path: Annotated[str, Field(max_length=1024)] = ""
    """Directory on the checkpoint volume with more of both, as the workers see it. Empty without a volume."""


class WorkerReport(OpenMessage):
    """A heartbeat: sent at the interval of `ReportReply`, and at once when `state` changes or a checkpoint is
    committed.
    """

    worker: Worker
    """Worker index."""
    incarnation: Incarnation
    """Incarnation."""
    pod_uid: PodUid
    """uid of the pod."""
    generation: Generation
    """The generation the ranks below belong to."""
    state: Annotated[AgentState, BeforeValidator(_known_or(AgentState, AgentState.STARTING))]
    """What the agent does. An unknown state counts as `Starting`, which restarts nothing."""
    paused: bool = False
    """Whether the ranks of `generation` stop, or have stopped, because of `ReportReply.pause`. The pod stays: the state
    is `Starting` or `Running` until all have exited, and then `Idle`. Agents before 0.2 never set it."""
    ranks: Annotated[list[RankProcess], Field(max_length=1024)] = []
    """Its ranks' processes."""
    failure: Annotated[FailureKind | None, BeforeValidator(_known_or(FailureKind, FailureKind.ERROR))] = None
    """Set when `state` is `Failed`. An unknown kind counts as `Error`."""
    message: Annotated[str, Field(max_length=2048)] = ""
    """The failure as a message: the last line of the exception, or the exit code."""
    progress: Progress | None = None
    """From the worker of rank 0."""
    checkpoint: CheckpointCommit | None = None
    """Latest complete checkpoint; from the worker of rank 0."""
    checkpoint_tiers: Annotated[list[CheckpointTier], Field(max_length=8)] = []
    """Where checkpoints are saved; from the worker of rank 0. Agents before 0.2 send none."""
    checkpoint_request: CheckpointAnswer | None = None
    """The last request for a checkpoint in this generation; from the worker of rank 0. Agents before 0.2 send none."""
    resumed_from: ResumedFrom | None = None
    """What this generation began from, if that is a checkpoint of another run; from the worker of rank 0. Agents before
    0.2 send none."""
    evaluation: Evaluation | None = None
    """Newest evaluation of this generation; from the worker of rank 0, with `training.evaluation`."""
    evidence: FailureEvidence | None = None
    """The latest failure of a rank of this worker, for a few minutes. Agents before 0.2 send none."""
    phases: Annotated[list[Phase], Field(max_length=16)] = []
    """Where the start of this generation spent its time; from the worker of rank 0."""
    preflight: PreflightReport | None = None
    """What the checks of the pod have found. None until they are done. Agents before 0.2 never check."""


class ReportReply(OpenMessage):
    """The coordinator's answer to a report."""

    generation: int
    """The newest announced generation."""
    report_seconds: float = DEFAULT_REPORT_SECONDS
    """Time until the agent's next report, unless its state changes before."""
    pause: Generation | None = None
    """The ranks of this generation save a checkpoint and stop. The agent then waits for the next generation. Agents
    before 0.2 ignore it."""
    leave: Generation | None = None
    """The ranks of this generation leave it and hold their state, because others are lost, with
    `MeshDocument.inMemory`. Agents before 0.2 ignore it."""
    checkpoint_request: Annotated[str, Field(max_length=64)] | None = None
    """Name of a request: the ranks of `generation` save a checkpoint after their current step, and go on. Only the
    worker of rank 0 gets it. Agents before 0.2 ignore it."""
    median_compute_seconds: float | None = None
    """Median of `RankProcess.computeSeconds` over the job's ranks, recently. Agents before 0.2 ignore it."""
    trust: Annotated[str, Field(max_length=64)] | None = None
    """Name of the CA bundle with which agents verify the coordinator (`meshwright.protocol.trust`). If an agent has
    another bundle, it requests this one. Missing without TLS."""


class TrustRequest(OpenMessage):
    """An agent's request for the CA bundle, with which it verifies the coordinator's certificate. It has no fields: the
    headers name the sender.

    If the verification failed, an agent sends this request, and no other, without verification. The request contains no
    secret, and the signature of the response shows that the bundle comes from the coordinator.
    """


class TrustBundle(OpenMessage):
    """The CA bundle of the coordinator."""

    certificates: Annotated[str, Field(max_length=MAX_BUNDLE_BYTES)]
    """CA certificates in PEM format. Empty without TLS."""
