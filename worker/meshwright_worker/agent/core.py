"""What the agent does next: a pure state machine over mesh documents, rank events, SIGTERM and time.

Every input method returns the actions that follow from it; the agent carries them out in order. The rules:

- A new generation's ranks start only when no process of the old one is left.
- Once a rank fails, the others of this pod are ended. One that only lost a peer is given a moment first: if the cause
  is in this pod too, its own error is about to arrive and is the one worth telling.
- A pod that goes away (SIGTERM, or superseded) lets its ranks save and stop, within the grace period, then exits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.protocol import CheckpointCommit, FailureKind, MeshDocument, MeshMember, WorkerState
from meshwright_worker import messages
from meshwright_worker.agent.generation import EXIT_STOPPED, Generation

# A peer's death breaks every connection within milliseconds; a second is ample for the other local ranks to notice.
PEER_LOST_SETTLE_SECONDS = 1.0
# What the user's command gets between SIGTERM and SIGKILL when its generation is over.
COMMAND_STOP_SECONDS = 2.0

EXIT_COMPLETE = 0
EXIT_REJECTED = 1
EXIT_DRAINED = EXIT_STOPPED


@dataclass(frozen=True, slots=True)
class Start:
    """Start the local ranks of this generation."""

    document: MeshDocument
    member: MeshMember


@dataclass(frozen=True, slots=True)
class Signal:
    """Send SIGTERM to these ranks."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill these ranks."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Exit:
    """Report a last time and end the agent with this code."""

    code: int


Action = Start | Signal | Kill | Exit


@dataclass(slots=True)
class Core:
    """The agent's state. Times are monotonic seconds."""

    worker: int
    incarnation: int
    drain_seconds: float
    generation: int = 0
    """Newest generation acted on."""
    current: Generation | None = None
    checkpoint: CheckpointCommit | None = None
    """Newest checkpoint, of this generation or an older one."""
    leaving: int | None = None
    """Exit code once the pod was told to go away."""
    _pending: Start | None = None
    _kill_at: float | None = None
    _signalled: bool = False
    _killed: bool = False

    def on_mesh(self, document: MeshDocument, now: float) -> list[Action]:
        """A mesh document arrived. One that is not newer than what runs is nothing new."""
        if document.generation <= self.generation or self.leaving is not None:
            return []
        member = next((m for m in document.members if m.worker == self.worker), None)
        self.generation = document.generation
        ours = member is not None and member.incarnation == self.incarnation
        self._pending = Start(document, member) if member is not None and ours else None
        if self.current is not None:
            self._end(now + (0.0 if self.current.own_runtime else COMMAND_STOP_SECONDS))
        return self.on_tick(now)

    def on_spawned(self, generation: int, rank: int, pid: int, now: float) -> list[Action]:
        """A rank's process runs."""
        if (current := self._of(generation)) is not None:
            current.spawned(rank, pid, now)
        return self.on_tick(now)

    def on_spawn_failed(self, generation: int, rank: int, message: str, now: float) -> list[Action]:
        """A rank's process could not be started; no further rank of the generation will be."""
        if (current := self._of(generation)) is not None:
            current.spawn_failed(rank, message, now)
        return self.on_tick(now)

    def on_message(
        self, generation: int, rank: int, message: messages.RankMessage, now: float, wall: str
    ) -> list[Action]:
        """A rank told something."""
        if (current := self._of(generation)) is not None:
            current.told(rank, message, now, wall)
            self.checkpoint = current.checkpoint or self.checkpoint
        return self.on_tick(now)

    def on_exit(self, generation: int, rank: int, code: int, tail: Sequence[str], now: float) -> list[Action]:
        """A rank's process ended."""
        if (current := self._of(generation)) is not None:
            current.exited(rank, code, tail, now)
        return self.on_tick(now)

    def on_leave(self, code: int, now: float) -> list[Action]:
        """The pod goes away: let ranks save and stop, then exit with `code`. The first call counts."""
        if self.leaving is None:
            self.leaving = code
            self._pending = None
            if self.current is not None:
                self._end(now + self.drain_seconds)
        return self.on_tick(now)

    def on_tick(self, now: float) -> list[Action]:
        """What is due by now. Call at `deadline` if nothing else happens before."""
        current = self.current
        if current is not None and current.live:
            self._end_after_failure(current, now)
            return self._due(current, now)
        if self.leaving is not None:
            return [Exit(EXIT_COMPLETE if self.state is WorkerState.COMPLETE else self.leaving)]
        if self._pending is not None:
            return [self._start(now)]
        return [Exit(EXIT_COMPLETE)] if self.state is WorkerState.COMPLETE else []

    @property
    def waits_to_start(self) -> bool:
        """Whether a generation is to start once the old one's processes are gone."""
        return self._pending is not None

    @property
    def deadline(self) -> float | None:
        """When `on_tick` is due though nothing happens."""
        current = self.current
        if current is None or not current.live:
            return None
        due = [] if self._kill_at is None or self._killed else [self._kill_at]
        if current.failed_at is not None and self._kill_at is None:
            due.append(current.failed_at + PEER_LOST_SETTLE_SECONDS)
        return min(due, default=None)

    @property
    def state(self) -> WorkerState:
        """What to report."""
        if self.current is None:
            return WorkerState.IDLE
        state = self.current.state
        if self.leaving is not None and state is not WorkerState.COMPLETE:
            return WorkerState.DRAINING
        return state

    def _of(self, generation: int) -> Generation | None:
        return self.current if self.current is not None and self.current.number == generation else None

    def _start(self, now: float) -> Start:
        start = self._pending
        assert start is not None
        self._pending = None
        self._kill_at, self._signalled, self._killed = None, False, False
        self.current = Generation(
            number=start.document.generation,
            first_rank=start.member.first_rank,
            count=start.member.ranks,
            own_runtime=start.document.run.command is None,
            started=now,
        )
        return start

    def _end_after_failure(self, current: Generation, now: float) -> None:
        if current.failed_at is None or self._killed:
            return
        own_error = any(failure.kind is not FailureKind.PEER_LOST for failure in current.failures)
        if own_error or now >= current.failed_at + PEER_LOST_SETTLE_SECONDS:
            self._end(now + (0.0 if current.own_runtime else COMMAND_STOP_SECONDS))

    def _end(self, kill_at: float) -> None:
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)

    def _due(self, current: Generation, now: float) -> list[Action]:
        if self._kill_at is None or self._killed:
            return []
        current.ending = True
        if now >= self._kill_at:
            self._killed = True
            return [Kill(tuple(current.live))]
        if not self._signalled:
            self._signalled = True
            return [Signal(tuple(current.live))]
        return []
