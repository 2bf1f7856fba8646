"""The messages between a worker pod's agent and the operator's coordinator, version 1.

Messages are JSON over HTTP. docs/protocol.md describes them for people, docs/protocol.schema.json for programs. Every
request is signed with the job's token (`meshwright.protocol.signing`) and names its version. The paths are below
`/v1/jobs/{namespace}/{name}/{uid}`:

    POST .../mesh      MeshRequest  -> 200 MeshDocument | 204 nothing new within `wait_seconds` | 410 superseded
    POST .../report    WorkerReport -> 200 ReportReply  | 410 superseded
    POST .../trust     TrustRequest -> 200 TrustBundle  | 410 superseded

401: not signed with the job's token. 404: no such job. 410: a newer incarnation of this worker exists, or the job needs
no pods; the agent stops its ranks and exits. 426: the coordinator does not support the agent's version. All other
responses are retried, 429 and 503 after `Retry-After`. Training continues while the coordinator is unavailable.

An agent ignores unknown fields, so that a newer operator may add some. The coordinator rejects unknown fields, because
messages come from a user's pod. A field that changes what ranks compute needs a new version.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError

from meshwright.api.base import ApiModel
from meshwright.protocol.run_config import RunConfig
from meshwright.protocol.trust import MAX_BUNDLE_BYTES

PROTOCOL_VERSION = 1
VERSION_HEADER = "Meshwright-Protocol"
"""Names the version of a request; without it a request is of version 1."""

Message = TypeVar("Message", bound=ApiModel)


def parse_message(kind: type[Message], body: bytes) -> Message:
    """Parse the message in `body`, and ignore unknown fields.

    Raises:
        ValueError: `body` is not a valid message (pydantic's `ValidationError` is a ValueError).
    """
    raw: Any = json.loads(body)
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        unknown = [e["loc"] for e in error.errors(include_url=False) if e["type"] == "extra_forbidden"]
        if not unknown:
            raise
    try:
        for location in unknown:
            _drop(raw, location)
    except (LookupError, TypeError):
        raise ValueError(f"the fields {unknown[:3]} are not known and cannot be left out") from None
    return kind.model_validate(raw)


def _drop(raw: Any, location: tuple[int | str, ...]) -> None:
    for part in location[:-1]:
        raw = raw[part]
    del raw[location[-1]]


class MeshRequest(ApiModel):
    """An agent's long poll for a mesh generation that is newer than `generation`."""

    worker: Annotated[int, Field(ge=0, le=65535)]
    """Worker index."""
    incarnation: Annotated[int, Field(ge=0)]
    """Incarnation of the worker's pod."""
    pod_uid: Annotated[str, Field(max_length=64)] = ""
    """uid of the pod. Empty if the agent does not know it."""
    generation: Annotated[int, Field(ge=0)] = 0
    """The generation this agent runs or ran last; 0 before its first."""
    address: Annotated[str, Field(min_length=1, max_length=64)]
    """IP address of the pod."""
    store_port: Annotated[int, Field(ge=1, le=65535)]
    """Port that this agent reserves for rank 0's store in the next generation."""
    wait_seconds: Annotated[float, Field(ge=0, le=60)] = 25.0
    """Time for which the coordinator may delay the response."""


class MeshMember(ApiModel):
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


class MeshDocument(ApiModel):
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
    run: RunConfig
    """What to run."""


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


class RankProcess(ApiModel):
    """One rank's process."""

    rank: int
    """Global rank."""
    pid: int
    """Process id, as the agent sees it."""
    exit_code: int | None = None
    """Exit code; minus the signal's number when killed; None while it lives."""
    step: int | None = None
    """Last step it finished in this generation; None before the first, and for a user's command."""
    phase: Annotated[str, Field(max_length=32)] = ""
    """Last phase of the start it finished; empty before the first, and for a user's command."""
    idle_seconds: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Time since its last progress: a start, a completed phase or step, or a saved checkpoint."""
    state: Annotated[str, Field(max_length=1)] = ""
    """State letter of the process (proc(5)) if it has been idle for a while, such as `T` for stopped."""


class Progress(ApiModel):
    """Progress of training, reported by the worker of rank 0."""

    step: int
    """Last finished step."""
    loss: float
    """Mean loss per token of that step."""
    tokens_per_second: float = 0.0
    """Recent throughput of the job."""
    step_seconds: float = 0.0
    """Recent mean time of a step."""
    samples: int = 0
    """Sequences consumed since the beginning of the run."""


class Evaluation(ApiModel):
    """What the last evaluation on documents that are never trained on came to."""

    step: int
    """Step after which it was done."""
    loss: float
    """Mean loss per token."""


class CheckpointCommit(ApiModel):
    """A checkpoint became complete."""

    step: int
    """Step after which it was taken."""
    time: str
    """When, RFC 3339."""
    path: str
    """Its directory, as the workers see it."""


class Phase(ApiModel):
    """Time spent in one phase of starting a generation, such as `spawn`, `rendezvous`, `load`, `first-step`."""

    name: Annotated[str, Field(max_length=32)]
    """Name of the phase."""
    seconds: float
    """How long it took."""


class WorkerReport(ApiModel):
    """A heartbeat: sent every few seconds and at once when `state` changes or a checkpoint is committed."""

    worker: Annotated[int, Field(ge=0, le=65535)]
    """Worker index."""
    incarnation: Annotated[int, Field(ge=0)]
    """Incarnation."""
    pod_uid: Annotated[str, Field(max_length=64)] = ""
    """uid of the pod. Empty if the agent does not know it."""
    generation: Annotated[int, Field(ge=0)]
    """The generation the ranks below belong to."""
    state: AgentState
    """What the agent does."""
    ranks: Annotated[list[RankProcess], Field(max_length=1024)] = []
    """Its ranks' processes."""
    failure: FailureKind | None = None
    """Set when `state` is `Failed`."""
    message: Annotated[str, Field(max_length=2048)] = ""
    """The failure as a message: the last line of the exception, or the exit code."""
    progress: Progress | None = None
    """From the worker of rank 0."""
    checkpoint: CheckpointCommit | None = None
    """Latest complete checkpoint; from the worker of rank 0."""
    evaluation: Evaluation | None = None
    """Newest evaluation of this generation; from the worker of rank 0, with `training.evaluation`."""
    phases: Annotated[list[Phase], Field(max_length=16)] = []
    """Where the start of this generation spent its time; from the worker of rank 0."""


class ReportReply(ApiModel):
    """The coordinator's answer to a report."""

    generation: int
    """The newest announced generation."""
    trust: Annotated[str, Field(max_length=64)] | None = None
    """Name of the CA bundle with which agents verify the coordinator (`meshwright.protocol.trust`). If an agent has
    another bundle, it requests this one. Missing without TLS."""


class TrustRequest(ApiModel):
    """An agent's request for the CA bundle, with which it verifies the coordinator's certificate.

    If the verification failed, an agent sends this request, and no other, without verification. The request contains no
    secret, and the signature of the response shows that the bundle comes from the coordinator.
    """

    worker: Annotated[int, Field(ge=0, le=65535)]
    """Worker index."""
    incarnation: Annotated[int, Field(ge=0)]
    """Incarnation of the worker's pod."""
    pod_uid: Annotated[str, Field(max_length=64)] = ""
    """uid of the pod. Empty if the agent does not know it."""


class TrustBundle(ApiModel):
    """The CA bundle of the coordinator."""

    certificates: Annotated[str, Field(max_length=MAX_BUNDLE_BYTES)]
    """CA certificates in PEM format. Empty without TLS."""
