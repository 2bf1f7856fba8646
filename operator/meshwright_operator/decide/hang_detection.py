"""Ranks that live and do nothing, and agents that say nothing.

In synchronous training one rank that hangs stops all others in their next collective, where they look just the same.
So a hang is told by time alone, and who is named follows from what the ranks last said: the one that is behind, or
whose process does not even run. A silent agent is given up only when training stands too: while anybody's steps
advance, the silent worker's ranks must be alive, and only its way to the coordinator is broken.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.protocol.messages import RankProcess
from meshwright.protocol.messages import WorkerState as AgentState
from meshwright_operator.decide.agents import ReceivedReport
from meshwright_operator.decide.mesh_generation import rank_zero_worker
from meshwright_operator.decide.observed import Observed, Worker, WorkerState
from meshwright_operator.decide.restart_policy import HANG, POD_LOST, Interruption
from meshwright_operator.timestamps import seconds_since

MIN_TIMEOUT_SECONDS = 300.0
"""Shortest default timeout: a large checkpoint or a slow volume is no hang."""
TIMEOUT_STEPS = 10
"""The default timeout, in steps."""
START_SECONDS = 900.0
"""Shortest timeout before the first step: ranks connect, build, load and compile."""
FRESH_REPORT_SECONDS = 15.0
"""A report older than this says nothing about now."""
SILENT_SECONDS = 60.0
"""How long an agent may be silent: thirty of its reports."""
SILENT_STEPS = 3.0
"""How long training must have stopped before a silent agent is given up, in steps."""
ADOPT_GENERATION_SECONDS = 120.0
"""How long an agent that reports may take to end the ranks of an older generation."""

STUCK_PROCESS_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "stuck in the kernel", "Z": "a zombie"}
"""States of a process (proc(5)) in which it cannot even take part in a collective."""


@dataclass(frozen=True, slots=True)
class IdleRank:
    """A live rank and how long ago it gave a sign."""

    worker: Worker
    process: RankProcess
    seconds: float

    @property
    def started(self) -> bool:
        """Whether it has finished a step of this generation."""
        return self.process.step is not None

    @property
    def culprit_order(self) -> tuple[bool, int, float, int]:
        """The smallest is the likeliest to be at fault: not running, behind, longest silent, first."""
        step = -1 if self.process.step is None else self.process.step
        return self.process.state not in STUCK_PROCESS_STATES, step, -self.seconds, self.process.rank


@dataclass(frozen=True, slots=True)
class HangRule:
    """When a rank hangs and when an agent is silent for too long, for one job at one moment."""

    observed: Observed

    @property
    def applies(self) -> bool:
        """Whether ranks are watched: a command of the user's reports no steps."""
        return self.observed.spec.runtime.command is None

    def timeout(self, started: bool) -> float:
        """Seconds without a sign after which a rank hangs. `started`: it has finished a step of this generation."""
        chosen = self.observed.spec.recovery.hang_timeout_seconds
        default = max(MIN_TIMEOUT_SECONDS, TIMEOUT_STEPS * self._step_seconds())
        seconds = float(chosen) if chosen is not None else default
        return seconds if started else max(seconds, START_SECONDS)

    def is_hung(self, rank: IdleRank) -> bool:
        """Whether a live rank hangs."""
        return rank.seconds >= self.timeout(rank.started)

    def is_stalled(self, rank: IdleRank) -> bool:
        """Whether a live rank has stopped for long enough that a silent agent may be the reason."""
        limit = max(SILENT_SECONDS, SILENT_STEPS * self._step_seconds()) if rank.started else START_SECONDS
        return rank.seconds >= limit

    def silence(self, worker: Worker) -> float:
        """Seconds without a report of the worker's agent, while one could have arrived."""
        received, listening = _report(self.observed, worker), self.observed.agents.listening_seconds
        return min(received.age, listening) if received is not None else listening

    def _step_seconds(self) -> float:
        received = self.observed.agents.reports.get(rank_zero_worker(self.observed))
        progress = received.report.progress if received is not None else None
        if progress is None or received is None or received.report.generation != self.observed.mesh.generation:
            return 0.0
        seconds = progress.step_seconds
        # The number comes from a tenant's pod: one that is none must not switch the timeout off.
        return seconds if 0.0 <= seconds <= MIN_TIMEOUT_SECONDS * TIMEOUT_STEPS else 0.0


def hung_ranks(observed: Observed) -> Interruption | None:
    """Ranks that live and finish no step."""
    rule, ranks = HangRule(observed), _live_ranks(observed)
    if not any(rule.is_hung(rank) for rank in ranks):
        return None
    # A hung rank stops all others of its generation: the one to name is chosen among all of them.
    named = min(ranks, key=lambda rank: rank.culprit_order)
    others = len(ranks) - 1
    text = f"{_describe(named)}; {others} other {'rank waits' if others == 1 else 'ranks wait'}" if others else ""
    return Interruption(HANG, text or _describe(named), detected_in=named.seconds)


def _describe(rank: IdleRank) -> str:
    process, worker = rank.process, rank.worker
    state = f", {STUCK_PROCESS_STATES[process.state]}" if process.state in STUCK_PROCESS_STATES else ""
    last = f"step {process.step}" if process.step is not None else f"phase {process.phase or 'spawn'}"
    return (
        f"rank {process.rank} (worker {worker.index} on {worker.node}, process {process.pid}{state})"
        f" made no progress for {rank.seconds:.0f} s; last done: {last}"
    )


def silent_agents(observed: Observed) -> Interruption | None:
    """Agents that report nothing while training has stopped."""
    rule, ranks = HangRule(observed), _live_ranks(observed)
    running = [worker for worker in observed.workers if worker.state is WorkerState.RUNNING]
    silent = [(worker, rule.silence(worker)) for worker in running if rule.silence(worker) >= SILENT_SECONDS]
    # If no agent reports, the operator itself is cut off.
    received = any(_has_fresh_report(observed, worker) for worker in running)
    if not silent or not received or not ranks or not all(rule.is_stalled(rank) for rank in ranks):
        return None
    named = ", ".join(f"worker {worker.index} on {worker.node} for {seconds:.0f} s" for worker, seconds in silent[:3])
    message = f"training stands, and nothing was heard of {named}"
    return Interruption(POD_LOST, message, detected_in=silent[0][1], lost=tuple(worker for worker, _ in silent))


def stuck_agents(observed: Observed) -> Interruption | None:
    """Agents that learned of the generation long ago and still report the one before: their ranks do not end."""
    if seconds_since(observed.mesh.started_time, observed.now) < ADOPT_GENERATION_SECONDS:
        return None
    if observed.agents.listening_seconds < ADOPT_GENERATION_SECONDS:
        return None
    stuck = [w for w in observed.workers if w.state is WorkerState.RUNNING and _is_behind(observed, w)]
    if not stuck:
        return None
    named = ", ".join(f"worker {worker.index} on {worker.node}" for worker in stuck[:3])
    message = f"{named} did not take up generation {observed.mesh.generation}: its old ranks do not end"
    return Interruption(HANG, message, lost=tuple(stuck))


def _live_ranks(observed: Observed) -> list[IdleRank]:
    """Ranks of the generation in effect whose agents reported just now; none if the hang rule does not apply."""
    if not HangRule(observed).applies:
        return []
    found = []
    reports = observed.reports_in(AgentState.RUNNING) | observed.reports_in(AgentState.STARTING)
    for worker in observed.workers:
        received = reports.get(worker.index)
        if received is None or received.age > FRESH_REPORT_SECONDS or worker.state is not WorkerState.RUNNING:
            continue
        live = [process for process in received.report.ranks if process.exit_code is None]
        found += [IdleRank(worker, process, process.idle_seconds + received.age) for process in live]
    return found


def _report(observed: Observed, worker: Worker) -> ReceivedReport | None:
    received = observed.agents.reports.get(worker.index)
    return received if received is not None and received.report.incarnation == worker.incarnation else None


def _has_fresh_report(observed: Observed, worker: Worker) -> bool:
    received = _report(observed, worker)
    return received is not None and received.age <= FRESH_REPORT_SECONDS


def _is_behind(observed: Observed, worker: Worker) -> bool:
    received = _report(observed, worker)
    fresh = received is not None and received.age <= FRESH_REPORT_SECONDS
    return fresh and received is not None and received.report.generation < observed.mesh.generation
