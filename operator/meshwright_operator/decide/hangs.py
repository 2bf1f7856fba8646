"""Ranks that live and do nothing, and agents that say nothing.

In synchronous training one rank that hangs stops all others in their next collective, where they look just the same.
So a hang is told by time alone, and who is named follows from what the ranks last said: the one that is behind, or
whose process does not even run. A silent agent is given up only when training stands too: while anybody's steps
advance, the silent worker's ranks must be alive, and only its way to the coordinator is broken.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.protocol import RankProcess
from meshwright.protocol import WorkerState as AgentState
from meshwright_operator.clock import seconds_since
from meshwright_operator.coordinator.board import Heard
from meshwright_operator.decide.observed import Observed, Worker, WorkerState
from meshwright_operator.decide.ranks import leader
from meshwright_operator.decide.recovery import HANG, POD_LOST, Break, reports_in

FLOOR_SECONDS = 300.0
"""Shortest time-out that is chosen by itself: a large checkpoint or a slow volume is no hang."""
STEPS = 10.0
"""The time-out that is chosen by itself, in steps."""
START_SECONDS = 900.0
"""Before the first step: meeting, building, loading and compiling take their time."""
FRESH_SECONDS = 15.0
"""A report older than this says nothing about now."""
SILENT_SECONDS = 60.0
"""How long an agent may be silent, being thirty of its reports."""
SILENT_STEPS = 3.0
TAKE_UP_SECONDS = 120.0
"""How long an agent that is heard of may take to end the ranks of an older generation."""

STOPPED = {"T": "stopped", "t": "stopped by a debugger", "D": "stuck in the kernel", "Z": "a zombie"}
"""States of a process (proc(5)) in which it cannot even take part in a collective."""


@dataclass(frozen=True, slots=True)
class _Idle:
    """A live rank and how long it has told nothing."""

    worker: Worker
    process: RankProcess
    seconds: float

    @property
    def suspicion(self) -> tuple[bool, int, float, int]:
        """The smallest is the likeliest to be at fault: not running, behind, longest silent, first."""
        step = -1 if self.process.step is None else self.process.step
        return self.process.state not in STOPPED, step, -self.seconds, self.process.rank


def diagnose(observed: Observed) -> Break | None:
    """A hang, a silent agent, or one that cannot end its old ranks; None while nothing of that is seen."""
    ranks = _live_ranks(observed) if observed.spec.runtime.command is None else []
    return _hung(observed, ranks) or _silent(observed, ranks) or _stuck_agent(observed)


def time_out(observed: Observed, started: bool) -> float:
    """Seconds without a sign after which a rank hangs. `started`: it has finished a step of this generation."""
    chosen = observed.spec.recovery.hang_timeout_seconds
    seconds = float(chosen) if chosen is not None else max(FLOOR_SECONDS, STEPS * _step_seconds(observed))
    return seconds if started else max(seconds, START_SECONDS)


def _hung(observed: Observed, ranks: list[_Idle]) -> Break | None:
    hung = [rank for rank in ranks if rank.seconds >= time_out(observed, rank.process.step is not None)]
    if not hung:
        return None
    # All that a generation runs stands still with it: whoever is named is chosen among all of them.
    named = min(ranks, key=lambda rank: rank.suspicion)
    others = len(ranks) - 1
    text = f"{_describe(named)}; {others} other {'rank waits' if others == 1 else 'ranks wait'}" if others else ""
    return Break(HANG, text or _describe(named), detected_in=named.seconds)


def _describe(rank: _Idle) -> str:
    process, worker = rank.process, rank.worker
    state = f", {STOPPED[process.state]}" if process.state in STOPPED else ""
    last = f"step {process.step}" if process.step is not None else f"phase {process.phase or 'spawn'}"
    return (
        f"rank {process.rank} (worker {worker.index} on {worker.node}, process {process.pid}{state})"
        f" made no progress for {rank.seconds:.0f} s; last done: {last}"
    )


def _silent(observed: Observed, ranks: list[_Idle]) -> Break | None:
    agents = observed.agents
    silent, heard = [], False
    for worker in observed.workers:
        if worker.state is not WorkerState.RUNNING:
            continue
        report = _report(observed, worker)
        quiet = min(report.age, agents.listening_for) if report is not None else agents.listening_for
        if quiet >= SILENT_SECONDS:
            silent.append((worker, quiet))
        heard = heard or (report is not None and report.age <= FRESH_SECONDS)
    if not silent or not heard or not ranks:
        return None
    still = max(SILENT_SECONDS, SILENT_STEPS * _step_seconds(observed))
    bounds = [still if rank.process.step is not None else START_SECONDS for rank in ranks]
    if any(rank.seconds < bound for rank, bound in zip(ranks, bounds, strict=True)):
        return None
    named = ", ".join(f"worker {w.index} on {w.node} for {quiet:.0f} s" for w, quiet in silent[:3])
    message = f"training stands, and nothing was heard of {named}"
    return Break(POD_LOST, message, detected_in=silent[0][1], lost=tuple(w for w, _ in silent))


def _stuck_agent(observed: Observed) -> Break | None:
    """An agent that was told of the generation long ago and still answers for the one before: its ranks do not die."""
    if seconds_since(observed.mesh.started_time, observed.now) < TAKE_UP_SECONDS:
        return None
    if observed.agents.listening_for < TAKE_UP_SECONDS:
        return None
    stuck = []
    for worker in observed.workers:
        heard = _report(observed, worker)
        behind = heard is not None and heard.age <= FRESH_SECONDS and heard.report.generation < observed.mesh.generation
        if behind and worker.state is WorkerState.RUNNING:
            stuck.append(worker)
    if not stuck:
        return None
    named = ", ".join(f"worker {worker.index} on {worker.node}" for worker in stuck[:3])
    message = f"{named} did not take up generation {observed.mesh.generation}: its old ranks do not end"
    return Break(HANG, message, lost=tuple(stuck))


def _live_ranks(observed: Observed) -> list[_Idle]:
    """Ranks whose agents were just heard of, in the generation in effect."""
    found = []
    reports = reports_in(observed, AgentState.RUNNING) | reports_in(observed, AgentState.STARTING)
    for worker in observed.workers:
        heard = reports.get(worker.index)
        if heard is None or heard.age > FRESH_SECONDS or worker.state is not WorkerState.RUNNING:
            continue
        live = [process for process in heard.report.ranks if process.exit_code is None]
        found += [_Idle(worker, process, process.idle_seconds + heard.age) for process in live]
    return found


def _report(observed: Observed, worker: Worker) -> Heard | None:
    heard = observed.agents.reports.get(worker.index)
    return heard if heard is not None and heard.report.incarnation == worker.incarnation else None


def _step_seconds(observed: Observed) -> float:
    heard = observed.agents.reports.get(leader(observed))
    progress = heard.report.progress if heard is not None else None
    if progress is None or heard is None or heard.report.generation != observed.mesh.generation:
        return 0.0
    seconds = progress.step_seconds
    # The number comes from a tenant's pod: one that is none must not switch the time-out off.
    return seconds if 0.0 <= seconds <= FLOOR_SECONDS * STEPS else 0.0
