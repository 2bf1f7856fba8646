"""Events of the agent, as plain values in one queue: only the agent's main loop acts on them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from meshwright.protocol.messages import MeshDocument
from meshwright_worker.rank import messages
from meshwright_worker.rank.task import StepReport


@dataclass(frozen=True, slots=True)
class MeshReceived:
    """The coordinator announced a mesh."""

    document: MeshDocument


@dataclass(frozen=True, slots=True)
class RankMessageReceived:
    """A rank's process sent a message."""

    generation: int
    rank: int
    message: messages.RankMessage


@dataclass(frozen=True, slots=True)
class OutputWritten:
    """The process of a user's command wrote to its standard output or error."""

    generation: int
    rank: int


@dataclass(frozen=True, slots=True)
class ProgressLogged:
    """A line of the log of a user's command names a completed step."""

    generation: int
    rank: int
    report: StepReport


@dataclass(frozen=True, slots=True)
class RankExited:
    """A rank's process exited; `tail` is its last output."""

    generation: int
    rank: int
    code: int
    tail: tuple[str, ...]
    pid: int = 0
    """Its process id: a process that goes on in another generation may have another rank there."""


@dataclass(frozen=True, slots=True)
class PauseRequested:
    """The ranks of a generation are to save a checkpoint and stop, while the pod stays."""

    generation: int


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """The ranks of a generation are to leave it and hold their state, because others are lost."""

    generation: int


@dataclass(frozen=True, slots=True)
class CheckpointRequested:
    """The ranks of a generation are to save a checkpoint after their current step, and go on."""

    generation: int
    request: str


@dataclass(frozen=True, slots=True)
class ShutdownRequested:
    """The pod is to stop; `reason` is for the log."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class BackgroundTaskFailed:
    """A background task of the agent failed with an internal error."""

    error: BaseException


Event = (
    MeshReceived
    | RankMessageReceived
    | OutputWritten
    | ProgressLogged
    | RankExited
    | PauseRequested
    | LeaveRequested
    | CheckpointRequested
    | ShutdownRequested
    | BackgroundTaskFailed
)
EventQueue = asyncio.Queue[Event]
