"""Messages from a rank's process to its agent: one JSON object per line, one line per event.

JSON and not pickle: the agent must be able to read messages of a broken rank without executing any of its code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from meshwright.protocol.messages import FailureKind
from meshwright_worker.rank.task import Outcome, StepReport, Work


@dataclass(frozen=True, slots=True)
class PhaseDone:
    """A start-up phase is complete."""

    name: str
    seconds: float
    kind: Literal["phase"] = "phase"


@dataclass(frozen=True, slots=True)
class Running:
    """Start-up is complete; training resumes after `step`."""

    step: int
    source: str = ""
    """The checkpoint of another run that the state is from; empty if there is none."""
    kind: Literal["running"] = "running"


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step is complete."""

    report: StepReport
    kind: Literal["step"] = "step"


@dataclass(frozen=True, slots=True)
class AtWork:
    """Text is tokenized, or a load, a compilation, an evaluation or the wait for a save goes on."""

    work: Work | None = None
    """How much is done, if that is known."""
    kind: Literal["at-work"] = "at-work"


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint is durable and complete."""

    step: int
    path: str
    seconds: float
    kind: Literal["checkpoint"] = "checkpoint"


@dataclass(frozen=True, slots=True)
class CheckpointBegun:
    """A checkpoint that was requested is taken after `step`."""

    step: int
    kind: Literal["checkpoint-begun"] = "checkpoint-begun"


@dataclass(frozen=True, slots=True)
class RankFailed:
    """The rank raised an exception; it exits next."""

    failure: FailureKind
    message: str
    kind: Literal["failed"] = "failed"


@dataclass(frozen=True, slots=True)
class Finished:
    """Training returned; the rank exits next."""

    outcome: Outcome
    kind: Literal["finished"] = "finished"


@dataclass(frozen=True, slots=True)
class Held:
    """The rank has left its generation, and holds its state until it is told how to go on. Its last message before."""

    step: int
    """The last step whose update it has made."""
    reduced: int | None
    """The next step, if it has that step's gradients, summed over replicas."""
    seconds: float
    """Time that leaving took."""
    copies: tuple[tuple[int, int], ...] = ()
    """Rank and step of each complete copy that the process has in host memory."""
    kind: Literal["held"] = "held"


RankMessage = PhaseDone | Running | StepDone | AtWork | CheckpointSaved | CheckpointBegun | RankFailed | Finished | Held

_ADAPTER: TypeAdapter[RankMessage] = TypeAdapter(Annotated[RankMessage, Field(discriminator="kind")])


def encode(message: RankMessage) -> bytes:
    """Encode a message as a line with its line feed. A NaN loss is written as `NaN`, which `decode` accepts."""
    return _ENCODER.encode(message).encode() + b"\n"


def _fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass with slots, for JSON: `asdict` would copy all of them, in each step of each rank."""
    return {name: getattr(value, name) for name in value.__slots__}


_ENCODER = json.JSONEncoder(default=_fields_of)


def decode(line: bytes) -> RankMessage:
    """Decode the message in `line`.

    Raises:
        ValueError: the line is not a valid message.
    """
    return _ADAPTER.validate_json(line)
