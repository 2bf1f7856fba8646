"""Decides the agent's next actions: a pure state machine over mesh documents, rank events, pauses, SIGTERM and time.

Every input method returns the resulting actions; the agent executes them in order. The rules:

- A new generation's ranks start only when every process of the previous one has exited.
- Once a rank fails, the pod's other ranks are stopped. If the failure is a lost peer, the agent waits first
  (`PEER_LOST_WAIT_SECONDS`): if the cause is in this pod too, that rank's own error arrives meanwhile and is reported
  instead.
- A pause of the current generation lets its ranks save and stop within the same time as SIGTERM. The agent then waits
  for the next generation. Ranks that have finished no step have nothing to save, and may wait for a peer or compile for
  minutes; ranks that have lost a peer cannot save. Both are killed.
- Ranks that hang write the stacks of their threads before they are killed: if the operator has found a hang, and if
  ranks of the built-in runtime have not stopped when the time to save is over.
- Ranks that recover in memory are not killed when one of them or of their peers is lost: they leave the generation and
  hold their state. The next generation's document says which of them go on with it; the others are killed. The agent
  may have missed the documents of generations in between, which made no step without its ranks.
- Ranks of a replica group that no failure concerns go on in the next generation, whatever else it has.
- A pod that stops (SIGTERM, or superseded) lets its ranks save and stop within the grace period, then exits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from meshwright.memory_recovery import keeping_ranks
from meshwright.protocol.messages import (
    AgentState,
    CheckpointAnswer,
    CheckpointCommit,
    FailureKind,
    MeshDocument,
    MeshMember,
    WorkerReport,
)
from meshwright.protocol.preflight import PreflightReport
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.agent.mesh_generation import EXIT_STOPPED, MeshGeneration
from meshwright_worker.rank import messages
from meshwright_worker.rank.task import StepReport

# A peer's death breaks every connection within milliseconds: one second is enough for the other local ranks to fail.
PEER_LOST_WAIT_SECONDS = 1.0
LEAVE_SECONDS = 3.0
"""Time for ranks to leave a generation. One that is still in it then is killed, and another starts instead."""
# Time between SIGTERM and SIGKILL for the user's command when its generation is over.
COMMAND_STOP_SECONDS = 2.0

EXIT_COMPLETE = 0
EXIT_REJECTED = 1
EXIT_DRAINED = EXIT_STOPPED

MAX_PHASES = 16


@dataclass(frozen=True, slots=True)
class StartRanks:
    """Start the local ranks of this generation."""

    document: MeshDocument
    member: MeshMember
    resumed: tuple[int, ...] = ()
    """The ranks whose processes go on with the state that they hold."""
    shift: int = 0
    """How much larger their numbers are than before: after a resize they are the ranks of another worker."""


@dataclass(frozen=True, slots=True)
class LeaveRanks:
    """Tell these ranks to leave the generation and hold their state."""

    generation: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TerminateRanks:
    """Send SIGTERM to these ranks."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestCheckpoint:
    """Ask rank 0 for a checkpoint after its current step."""


@dataclass(frozen=True, slots=True)
class DumpStacks:
    """Make these ranks write the stacks of their threads, and record them: they make no progress, and are killed."""

    ranks: tuple[int, ...]
    named: int | None = None
    """The rank that the operator names as the likely cause."""


@dataclass(frozen=True, slots=True)
class KillRanks:
    """Send SIGKILL to these ranks."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExitAgent:
    """Send a final report and exit the agent with this code."""

    code: int


Action = StartRanks | LeaveRanks | RequestCheckpoint | TerminateRanks | DumpStacks | KillRanks | ExitAgent


@dataclass(slots=True)
class AgentStateMachine:
    """The agent's state. Times are monotonic seconds."""

    worker: int
    incarnation: int
    pod_uid: str
    drain_seconds: float
    generation: int = 0
    """Newest generation that was applied."""
    current: MeshGeneration | None = None
    checkpoint: CheckpointCommit | None = None
    """Newest checkpoint, of this generation or an earlier one."""
    exit_code_on_shutdown: int | None = None
    """Exit code; set once the pod was asked to stop."""
    preflight: PreflightReport | None = None
    """What the checks of the pod have found, once they are done."""
    _pending: StartRanks | None = None
    _kill_at: float | None = None
    _sigterm_sent: bool = False
    _kill_sent: bool = False
    _leave_asked: bool = False
    _leave_ends_at: float | None = None
    """When ranks that leave the generation have had their time."""
    _save_ends_at: float | None = None
    """When ranks that save and stop have had their time."""

    def on_mesh(self, document: MeshDocument, now: float) -> list[Action]:
        """Handle a mesh document. Ignores a document that is not newer than the current generation."""
        if document.generation <= self.generation or self.exit_code_on_shutdown is not None:
            return []
        member = next((m for m in document.members if m.worker == self.worker), None)
        self.generation = document.generation
        ours = member is not None and member.incarnation == self.incarnation
        if member is not None and ours and (group := self._replica_group(document, member)) is not None:
            self._pending = None
            group.go_on(document.generation, now)
            return self.on_tick(now)
        self._pending = StartRanks(document, member) if member is not None and ours else None
        if self._pending is not None and self.current is not None and (kept := self._kept(self._pending)):
            shift = self._pending.member.first_rank - self.current.first_rank
            self._pending = replace(self._pending, resumed=kept, shift=shift)
            others = tuple(rank for rank in self.current.live if rank + shift not in kept)
            return [*([KillRanks(others)] if others else []), *self.on_tick(now)]
        hung: list[Action] = []
        if self.current is not None:
            live, going_on = tuple(self.current.live), not (self.current.ending or self.current.failures)
            if document.hung_rank is not None and live and going_on:
                self.current.ending = True
                hung = [DumpStacks(live, document.hung_rank)]
            self._schedule_kill(now + (0.0 if self.current.uses_builtin_runtime else COMMAND_STOP_SECONDS))
        return [*hung, *self.on_tick(now)]

    def on_spawned(self, generation: int, rank: int, pid: int, now: float) -> list[Action]:
        """Handle the start of a rank's process."""
        if (current := self._matching_generation(generation)) is not None:
            current.record_spawn(rank, pid, now)
        return self.on_tick(now)

    def on_spawn_failed(self, generation: int, rank: int, message: str, now: float) -> list[Action]:
        """Handle a rank's process that could not be started; the generation starts no further ranks."""
        if (current := self._matching_generation(generation)) is not None:
            current.record_spawn_failure(rank, message, now)
        return self.on_tick(now)

    def on_rejected_run(self, generation: int, message: str, now: float) -> list[Action]:
        """Handle a run that this image cannot execute; the generation starts no ranks."""
        if (current := self._matching_generation(generation)) is not None:
            current.record_rejected_run(message, now)
        return self.on_tick(now)

    def on_message(
        self, generation: int, rank: int, message: messages.RankMessage, now: float, time_of_day: str
    ) -> list[Action]:
        """Handle a rank's message."""
        if (current := self._matching_generation(generation)) is not None:
            current.record_message(rank, message, now, time_of_day)
            self.checkpoint = current.checkpoint or self.checkpoint
        return self.on_tick(now)

    def on_output(self, generation: int, rank: int, now: float) -> list[Action]:
        """Handle output of the user's command."""
        if (current := self._matching_generation(generation)) is not None:
            current.record_output(rank, now)
        return self.on_tick(now)

    def on_logged(self, generation: int, rank: int, report: StepReport, now: float) -> list[Action]:
        """Handle a line of the log of a user's command that names a step."""
        if (current := self._matching_generation(generation)) is not None:
            current.record_logged(rank, report)
        return self.on_tick(now)

    def on_exit(
        self, generation: int, rank: int, code: int, tail: Sequence[str], now: float, pid: int = 0
    ) -> list[Action]:
        """Handle the exit of a rank's process: also if it ended before it was counted in the generation in which it was
        to go on.
        """
        if (current := self._matching_generation(generation)) is not None:
            current.record_exit(rank, code, tail, now)
        elif self.current is not None and (taken_over := self.current.rank_of_process(pid)) is not None:
            self.current.record_exit(taken_over, code, tail, now)
        return self.on_tick(now)

    def on_leave(self, generation: int, now: float) -> list[Action]:
        """Handle a request to leave a generation, because ranks of other pods are lost."""
        current = self._matching_generation(generation)
        if current is not None and current.in_memory and generation == self.generation:
            self._leave_asked = True
        return self.on_tick(now)

    def on_pause(self, generation: int, now: float) -> list[Action]:
        """Handle a request to stop the ranks of a generation while the pod stays. Ignores one for another generation,
        and one while the pod stops. Later calls have no effect.
        """
        current = self._matching_generation(generation)
        stops_anyway = generation != self.generation or self.exit_code_on_shutdown is not None
        if current is not None and not current.paused and not stops_anyway:
            self._schedule_kill(now + (self.drain_seconds if current.can_save else 0.0))
            self._save_ends_at = now + self.drain_seconds
            current.record_pause()
        return self.on_tick(now)

    def on_checkpoint_request(self, generation: int, request: str, now: float) -> list[Action]:
        """Handle a request for a checkpoint. Each request counts once. While ranks start or stop it has no effect, and
        is repeated with the next reply.
        """
        current = self._matching_generation(generation)
        if current is None or self.exit_code_on_shutdown is not None or not current.takes_request(request):
            return self.on_tick(now)
        current.checkpoint_request = CheckpointAnswer(request=request)
        return [RequestCheckpoint(), *self.on_tick(now)]

    def on_shutdown(self, code: int, now: float) -> list[Action]:
        """Handle a request to stop the pod: let ranks save and stop, then exit with `code`. Later calls have
        no effect.
        """
        if self.exit_code_on_shutdown is None:
            self.exit_code_on_shutdown = code
            self._pending = None
            if self.current is not None:
                self._schedule_kill(now + self.drain_seconds)
                self._save_ends_at = now + self.drain_seconds
        return self.on_tick(now)

    def on_tick(self, now: float) -> list[Action]:
        """Return the actions that are due now. Call at `deadline` if no other event arrives before."""
        current = self.current
        if current is not None and current.live:
            if self._pending is not None and self._goes_on(current, self._pending):
                return [self._start(now)]
            if self._leaves(current):
                return self._leave(current, now)
            self._schedule_kill_after_failure(current, now)
            return self._due_actions(current, now)
        if self.exit_code_on_shutdown is not None:
            return [ExitAgent(EXIT_COMPLETE if self.state is AgentState.COMPLETE else self.exit_code_on_shutdown)]
        if self._pending is not None:
            return [self._start(now)]
        return [ExitAgent(EXIT_COMPLETE)] if self.state is AgentState.COMPLETE else []

    @property
    def has_pending_start(self) -> bool:
        """Whether a generation is waiting to start until the previous one's processes have exited."""
        return self._pending is not None

    @property
    def deadline(self) -> float | None:
        """Time at which `on_tick` is due without another event."""
        current = self.current
        if current is None or not current.live:
            return None
        due = [] if self._kill_at is None or self._kill_sent else [self._kill_at]
        if self._leaves(current):
            return self._leave_ends_at if current.busy and not self._kill_sent else None
        if current.failed_at is not None and self._kill_at is None:
            due.append(current.failed_at + PEER_LOST_WAIT_SECONDS)
        return min(due, default=None)

    @property
    def state(self) -> AgentState:
        """The state to report."""
        if self.current is None:
            return AgentState.IDLE
        state = self.current.state
        if self.exit_code_on_shutdown is not None and state is not AgentState.COMPLETE:
            return AgentState.DRAINING
        return state

    def _matching_generation(self, generation: int) -> MeshGeneration | None:
        return self.current if self.current is not None and self.current.has_ranks_of(generation) else None

    def _replica_group(self, document: MeshDocument, member: MeshMember) -> MeshGeneration | None:
        """The local ranks, if they are those of a replica group that goes on. If one has failed, that is reported."""
        groups, current = document.replica_groups, self.current
        if groups is None or current is None or current.first_rank != member.first_rank:
            return None
        return current if groups.groups[member.first_rank // groups.ranks].since == current.since else None

    def _kept(self, start: StartRanks) -> tuple[int, ...]:
        """The ranks of the next generation whose processes go on in it, with the state that they hold."""
        memory, current, member = start.document.memory, self.current, start.member
        if memory is None or current is None or self._kill_at is not None:
            return ()
        if not memory.generation <= current.number < start.document.generation:
            return ()
        if member.ranks != current.count:
            return ()
        keeping, shift = keeping_ranks(memory), member.first_rank - current.first_rank
        held = (rank + shift for rank, view in current.ranks.items() if view.live and view.held)
        return tuple(rank for rank in held if rank in keeping)

    def _goes_on(self, current: MeshGeneration, start: StartRanks) -> bool:
        """Whether only processes are left that go on in the next generation."""
        return bool(start.resumed) and {rank + start.shift for rank in current.live} <= set(start.resumed)

    def _leaves(self, current: MeshGeneration) -> bool:
        """Whether ranks leave the generation, or have left it, to hold their state."""
        interrupted = current.failed_at is not None or self._leave_asked
        return current.in_memory and interrupted and self._kill_at is None and self.exit_code_on_shutdown is None

    def _leave(self, current: MeshGeneration, now: float) -> list[Action]:
        if self._leave_ends_at is None:
            self._leave_ends_at = now + LEAVE_SECONDS
            return [LeaveRanks(current.number, tuple(current.busy))] if current.busy else []
        if current.busy and now >= self._leave_ends_at and not self._kill_sent:
            self._kill_sent = True
            return [KillRanks(tuple(current.busy))]
        return []

    def _start(self, now: float) -> StartRanks:
        start = self._pending
        assert start is not None
        before = self.current
        live = {rank + start.shift for rank in before.live} if before is not None else set()
        start = replace(start, resumed=tuple(rank for rank in start.resumed if rank in live))
        self._pending = None
        self._leave_asked, self._leave_ends_at = False, None
        self._kill_at, self._sigterm_sent, self._kill_sent, self._save_ends_at = None, False, False, None
        self.current = MeshGeneration(
            number=start.document.generation,
            first_rank=start.member.first_rank,
            count=start.member.ranks,
            uses_builtin_runtime=isinstance(start.document.run, NativeRun),
            started=now,
            in_memory=bool(start.document.in_memory),
        )
        if before is not None:
            for rank in start.resumed:
                self.current.take_over(rank, before.ranks[rank - start.shift], now)
        return start

    def _schedule_kill_after_failure(self, current: MeshGeneration, now: float) -> None:
        if current.failed_at is None or self._kill_sent:
            return
        has_root_cause = any(failure.kind is not FailureKind.PEER_LOST for failure in current.failures)
        if has_root_cause or now >= current.failed_at + PEER_LOST_WAIT_SECONDS:
            self._schedule_kill(now + (0.0 if current.uses_builtin_runtime else COMMAND_STOP_SECONDS))

    def _schedule_kill(self, kill_at: float) -> None:
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)

    def _due_actions(self, current: MeshGeneration, now: float) -> list[Action]:
        if self._kill_at is None or self._kill_sent:
            return []
        current.ending = True
        if now >= self._kill_at:
            self._kill_sent = True
            live = tuple(current.live)
            overdue = self._save_ends_at is not None and now >= self._save_ends_at
            stuck = overdue and current.uses_builtin_runtime and not current.failures
            return [*([DumpStacks(live)] if stuck else []), KillRanks(live)]
        if not self._sigterm_sent:
            self._sigterm_sent = True
            return [TerminateRanks(tuple(current.live))]
        return []


def build_report(
    state_machine: AgentStateMachine, now: float = 0.0, read_process_state: Callable[[int], str] = lambda _: ""
) -> WorkerReport:
    """Build the heartbeat: the agent's state in the coordinator's format.

    It contains the complete state, so a lost report need not be repeated.

    Args:
        state_machine: the agent's state.
        now: monotonic seconds.
        read_process_state: returns the state letter of a process.
    """
    current = state_machine.current
    if current is None:
        return WorkerReport(
            worker=state_machine.worker,
            incarnation=state_machine.incarnation,
            pod_uid=state_machine.pod_uid,
            generation=state_machine.generation,
            state=state_machine.state,
            preflight=state_machine.preflight,
        )
    failure = current.failure
    has_rank_zero = current.first_rank == 0
    return WorkerReport(
        worker=state_machine.worker,
        incarnation=state_machine.incarnation,
        pod_uid=state_machine.pod_uid,
        generation=current.number,
        state=state_machine.state,
        paused=current.paused,
        ranks=current.processes(now, read_process_state),
        failure=failure.kind if failure else None,
        message=failure.message if failure else "",
        progress=current.progress,
        checkpoint=state_machine.checkpoint if has_rank_zero else None,
        checkpoint_tiers=current.tiers,
        checkpoint_request=current.checkpoint_request,
        resumed_from=current.resumed_from if has_rank_zero else None,
        evaluation=current.evaluation,
        phases=current.phases[:MAX_PHASES] if has_rank_zero else [],
        preflight=state_machine.preflight,
    )
