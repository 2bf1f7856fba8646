"""What a rank's process writes to its agent: one JSON object a line, one line an event.

JSON and not pickles: the agent must be able to read what a broken rank wrote without running any of it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from meshwright.protocol.messages import FailureKind
from meshwright_worker.rank.task import Outcome, StepReport


@dataclass(frozen=True, slots=True)
class PhaseDone:
    """A phase of the start is over."""

    name: str
    seconds: float
    kind: Literal["phase"] = "phase"


@dataclass(frozen=True, slots=True)
class Running:
    """Start-up is over; training goes on after `step`."""

    step: int
    kind: Literal["running"] = "running"


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step is finished."""

    report: StepReport
    kind: Literal["step"] = "step"


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint is durable and complete."""

    step: int
    path: str
    seconds: float
    kind: Literal["checkpoint"] = "checkpoint"


@dataclass(frozen=True, slots=True)
class RankFailed:
    """The rank raised; it exits next."""

    failure: FailureKind
    message: str
    kind: Literal["failed"] = "failed"


@dataclass(frozen=True, slots=True)
class Finished:
    """Training returned; the rank exits next."""

    outcome: Outcome
    kind: Literal["finished"] = "finished"


RankMessage = PhaseDone | Running | StepDone | CheckpointSaved | RankFailed | Finished

_ADAPTER: TypeAdapter[RankMessage] = TypeAdapter(Annotated[RankMessage, Field(discriminator="kind")])


def encode(message: RankMessage) -> bytes:
    """The line, with its line feed. A loss that is not a number is written as `NaN`, which `decode` reads."""
    return json.dumps(asdict(message)).encode() + b"\n"


def decode(line: bytes) -> RankMessage:
    """The message that stands in `line`.

    Raises:
        ValueError: it is none.
    """
    return _ADAPTER.validate_python(json.loads(line))
