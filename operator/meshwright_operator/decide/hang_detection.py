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
from meshwright_operator.decide.failure_detection import HANG, POD_LOST, Interruption, reports_with_state
from meshwright_operator.decide.observed import Observed, Worker, WorkerState
from meshwright_operator.decide.rank_assignment import rank_zero_worker
from meshwright_operator.timestamps import seconds_since

MIN_HANG_TIMEOUT_SECONDS = 300.0
"""Shortest time-out that is chosen by itself: a large checkpoint or a slow volume is no hang."""
HANG_TIMEOUT_STEPS = 10.0
"""The time-out that is chosen by itself, in steps."""
START_SECONDS = 900.0
"""Before the first step: meeting, building, loading and compiling take their time."""
FRESH_REPORT_SECONDS = 15.0
"""A report older than this says nothing about now."""
SILENT_SECONDS = 60.0
"""How long an agent may be silent, being thirty of its reports."""
SILENT_STEPS = 3.0
ADOPT_GENERATION_SECONDS = 120.0
"""How long an agent that is heard of may take to end the ranks of an older generation."""

STUCK_PROCESS_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "stuck in the kernel", "Z": "a zombie"}
"""States of a process (proc(5)) in which it cannot even take part in a collective."""


@dataclass(frozen=True, slots=True)
class _IdleRank:
    """A live rank and how long it has told nothing."""

    worker: Worker
    process: RankProcess
    seconds: float

    @property
    def culprit_order(self) -> tuple[bool, int, float, int]:
        """The smallest is the likeliest to be at fault: not running, behind, longest silent, first."""
        step = -1 if self.process.step is None else self.process.step
        return self.process.state not in STUCK_PROCESS_STATES, step, -self.seconds, self.process.rank


def diagnose(observed: Observed) -> Interruption | None:
    """A hang, a silent agent, or one that cannot end its old ranks; None while nothing of that is seen."""
    ranks = _live_ranks(observed) if observed.spec.runtime.command is None else []
    return _hung(observed, ranks) or _silent(observed, ranks) or _stuck_agent(observed)


def hang_timeout(observed: Observed, started: bool) -> float:
    """Seconds without a sign after which a rank hangs. `started`: it has finished a step of this generation."""
    chosen = observed.spec.recovery.hang_timeout_seconds
    seconds = (
        float(chosen)
        if chosen is not None
        else max(MIN_HANG_TIMEOUT_SECONDS, HANG_TIMEOUT_STEPS * _step_seconds(observed))
    )
    return seconds if started else max(seconds, START_SECONDS)


def _hung(observed: Observed, ranks: list[_IdleRank]) -> Interruption | None:
    hung = [rank for rank in ranks if rank.seconds >= hang_timeout(observed, rank.process.step is not None)]
    if not hung:
        return None
    # All that a generation runs stands still with it: whoever is named is chosen among all of them.
    named = min(ranks, key=lambda rank: rank.culprit_order)
    others = len(ranks) - 1
    text = f"{_describe(named)}; {others} other {'rank waits' if others == 1 else 'ranks wait'}" if others else ""
    return Interruption(HANG, text or _describe(named), detected_in=named.seconds)


def _describe(rank: _IdleRank) -> str:
    process, worker = rank.process, rank.worker
    state = f", {STUCK_PROCESS_STATES[process.state]}" if process.state in STUCK_PROCESS_STATES else ""
    last = f"step {process.step}" if process.step is not None else f"phase {process.phase or 'spawn'}"
    return (
        f"rank {process.rank} (worker {worker.index} on {worker.node}, process {process.pid}{state})"
        f" made no progress for {rank.seconds:.0f} s; last done: {last}"
    )


def _silent(observed: Observed, ranks: list[_IdleRank]) -> Interruption | None:
    agents = observed.agents
    silent, received = [], False
    for worker in observed.workers:
        if worker.state is not WorkerState.RUNNING:
            continue
        report = _report(observed, worker)
        silent_seconds = min(report.age, agents.listening_seconds) if report is not None else agents.listening_seconds
        if silent_seconds >= SILENT_SECONDS:
            silent.append((worker, silent_seconds))
        received = received or (report is not None and report.age <= FRESH_REPORT_SECONDS)
    if not silent or not received or not ranks:
        return None
    stalled_after = max(SILENT_SECONDS, SILENT_STEPS * _step_seconds(observed))
    bounds = [stalled_after if rank.process.step is not None else START_SECONDS for rank in ranks]
    if any(rank.seconds < bound for rank, bound in zip(ranks, bounds, strict=True)):
        return None
    named = ", ".join(f"worker {w.index} on {w.node} for {silent_seconds:.0f} s" for w, silent_seconds in silent[:3])
    message = f"training stands, and nothing was heard of {named}"
    return Interruption(POD_LOST, message, detected_in=silent[0][1], lost=tuple(w for w, _ in silent))


def _stuck_agent(observed: Observed) -> Interruption | None:
    """An agent that was told of the generation long ago and still answers for the one before: its ranks do not die."""
    if seconds_since(observed.mesh.started_time, observed.now) < ADOPT_GENERATION_SECONDS:
        return None
    if observed.agents.listening_seconds < ADOPT_GENERATION_SECONDS:
        return None
    stuck = []
    for worker in observed.workers:
        received = _report(observed, worker)
        behind = (
            received is not None
            and received.age <= FRESH_REPORT_SECONDS
            and received.report.generation < observed.mesh.generation
        )
        if behind and worker.state is WorkerState.RUNNING:
            stuck.append(worker)
    if not stuck:
        return None
    named = ", ".join(f"worker {worker.index} on {worker.node}" for worker in stuck[:3])
    message = f"{named} did not take up generation {observed.mesh.generation}: its old ranks do not end"
    return Interruption(HANG, message, lost=tuple(stuck))


def _live_ranks(observed: Observed) -> list[_IdleRank]:
    """Ranks whose agents were just heard of, in the generation in effect."""
    found = []
    reports = reports_with_state(observed, AgentState.RUNNING) | reports_with_state(observed, AgentState.STARTING)
    for worker in observed.workers:
        received = reports.get(worker.index)
        if received is None or received.age > FRESH_REPORT_SECONDS or worker.state is not WorkerState.RUNNING:
            continue
        live = [process for process in received.report.ranks if process.exit_code is None]
        found += [_IdleRank(worker, process, process.idle_seconds + received.age) for process in live]
    return found


def _report(observed: Observed, worker: Worker) -> ReceivedReport | None:
    received = observed.agents.reports.get(worker.index)
    return received if received is not None and received.report.incarnation == worker.incarnation else None


def _step_seconds(observed: Observed) -> float:
    received = observed.agents.reports.get(rank_zero_worker(observed))
    progress = received.report.progress if received is not None else None
    if progress is None or received is None or received.report.generation != observed.mesh.generation:
        return 0.0
    seconds = progress.step_seconds
    # The number comes from a tenant's pod: one that is none must not switch the time-out off.
    return seconds if 0.0 <= seconds <= MIN_HANG_TIMEOUT_SECONDS * HANG_TIMEOUT_STEPS else 0.0
