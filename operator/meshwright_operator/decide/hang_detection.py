"""Hung ranks and silent agents.

In synchronous training one hung rank stops all others in their next collective, where they look the same. So only the
time without progress shows that there is a hang; before the first step, in which ranks wait for those that still load
or compile, the time without progress of any rank. The ranks' last reports show which rank to name: one whose process is
stopped, or the one that is behind. The pod of a silent agent is replaced only if training has stopped too: while steps
advance, the silent worker's ranks must be alive, and only its connection to the coordinator is broken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from meshwright.protocol.messages import DEFAULT_REPORT_SECONDS, AgentState, RankProcess
from meshwright.protocol.run_config import CommandRun, NativeRun
from meshwright.rules.recovery_times import FIRST_STEP_SECONDS, MIN_TIMEOUT_SECONDS, TIMEOUT_STEPS, hang_timeout
from meshwright_operator.decide import start_work
from meshwright_operator.decide.agents import ReceivedReport
from meshwright_operator.decide.mesh_generation import rank_zero_worker
from meshwright_operator.decide.observed import Observed, PodState, Worker
from meshwright_operator.decide.report_interval import SILENT_SECONDS, known_idle_seconds, silent_after
from meshwright_operator.decide.restart_policy import HANG, NODE_LOST, POD_LOST, Interruption
from meshwright_operator.text import counted, sentences
from meshwright_operator.timestamps import parse_time, seconds_since

SILENT_STEPS = 3.0
"""How long training must have stopped before a silent agent's pod is replaced, in steps."""
ADOPT_GENERATION_SECONDS = 120.0
"""How long an agent that reports may take to stop the ranks of an older generation."""

STUCK_PROCESS_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "stuck in the kernel", "Z": "a zombie"}
"""States of a process (proc(5)) in which it cannot take part in a collective."""


@dataclass(frozen=True, slots=True)
class IdleRank:
    """A live rank and the time since its last progress."""

    worker: Worker
    process: RankProcess
    seconds: float

    @property
    def started(self) -> bool:
        """Whether it has finished a step of this generation."""
        return self.process.step is not None

    def seconds_with(self, least: float) -> float:
        """For how long it makes no progress without a reason, if a live rank made some `least` seconds ago.

        Before its first step a rank may wait for others, which load or compile for as long as they have to. So as long
        as one of them makes progress, none hangs whose process can go on.
        """
        return self.seconds if self.started or self.process.state in STUCK_PROCESS_STATES else least

    @property
    def likely_cause_order(self) -> tuple[bool, int, bool, float, int]:
        """The smallest is the likely cause: stopped processes, then the lowest step, then one at work for which others
        wait longer than it has done nothing, then the longest idle time.
        """
        step = -1 if self.process.step is None else self.process.step
        waits = self.started or not start_work.is_at_work(self.process.work)
        return self.process.state not in STUCK_PROCESS_STATES, step, waits, -self.seconds, self.process.rank


@dataclass(frozen=True, slots=True)
class HangRule:
    """When a rank counts as hung and an agent as silent, for one job at one moment."""

    observed: Observed
    step_seconds: float = field(init=False)
    """Seconds of a step as rank 0 reports them; 0 if unknown."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "step_seconds", _step_seconds(self.observed))

    def timeout(self, started: bool) -> float:
        """Seconds without progress after which a rank counts as hung.

        Args:
            started: whether the rank has finished a step of this generation.
        """
        return hang_timeout(self.observed.spec.recovery, self.step_seconds, started=started)

    def seconds_left(self, ranks: Sequence[IdleRank]) -> float | None:
        """Seconds until the first of the live ranks counts as hung if none makes progress. None without ranks."""
        least = least_idle_seconds(ranks)
        return min((self.timeout(rank.started) - rank.seconds_with(least) for rank in ranks), default=None)

    def is_stalled(self, rank: IdleRank) -> bool:
        """Whether a live rank has made no progress for so long that a silent agent may be the cause."""
        limit = max(SILENT_SECONDS, SILENT_STEPS * self.step_seconds) if rank.started else FIRST_STEP_SECONDS
        return rank.seconds >= limit

    def silence(self, worker: Worker) -> float:
        """Seconds without a report from the worker's agent, while the coordinator could have received one."""
        received, listening = _report(self.observed, worker), self.observed.agents.listening_seconds
        return min(received.age, listening) if received is not None else listening

    def silent_after(self, worker: Worker) -> float:
        """Seconds without a report after which the worker's agent counts as silent."""
        received = _report(self.observed, worker)
        return silent_after(received.interval if received is not None else DEFAULT_REPORT_SECONDS)

    def is_silent(self, worker: Worker) -> bool:
        """Whether the worker's agent has missed several reports."""
        return self.silence(worker) >= self.silent_after(worker)


def _step_seconds(observed: Observed) -> float:
    return observed.once("step seconds", lambda: _reported_step_seconds(observed))


def _reported_step_seconds(observed: Observed) -> float:
    received = observed.agents.reports.get(rank_zero_worker(observed))
    progress = received.report.progress if received is not None else None
    if progress is None or received is None or received.report.generation != observed.mesh.generation:
        return 0.0
    seconds = progress.step_seconds
    # The value comes from a user's pod: NaN must not disable the timeout.
    return seconds if 0.0 <= seconds <= MIN_TIMEOUT_SECONDS * TIMEOUT_STEPS else 0.0


def least_idle_seconds(ranks: Sequence[IdleRank]) -> float:
    """Seconds since the last progress of any of the ranks; 0 without ranks."""
    return min((rank.seconds for rank in ranks), default=0.0)


def hung_ranks(observed: Observed) -> Interruption | None:
    """Live ranks that finish no step within the hang timeout."""
    ranks = _live_ranks(observed)
    left = HangRule(observed).seconds_left(ranks)
    if left is None or left > 0:
        return None
    # A hung rank stops all others of its generation: choose the rank to name among all of them.
    named = min(ranks, key=lambda rank: rank.likely_cause_order)
    others = len(ranks) - 1
    waiting = f"{counted(others, 'rank')} {'waits' if others == 1 else 'wait'} for it" if others else ""
    finished = _finished_ranks(observed) if isinstance(observed.run, CommandRun) else []
    message = sentences(_describe(named), waiting, _describe_finished(finished))
    seconds = named.seconds_with(least_idle_seconds(ranks))
    return Interruption(HANG, message, seconds, worker=named.worker.index, rank=named.process.rank)


def seconds_until_hung(observed: Observed) -> float | None:
    """Seconds until the next rank counts as hung if it makes no progress. None if none can."""
    if isinstance(observed.run, CommandRun) and not _live_ranks(observed):
        timeout, ranks = observed.spec.recovery.hang_timeout_seconds, idle_commands(observed)
        return None if timeout is None or not ranks else timeout - min(rank.seconds for rank in ranks)
    return HangRule(observed).seconds_left(_live_ranks(observed))


def _describe(rank: IdleRank) -> str:
    process, worker = rank.process, rank.worker
    state = f", {STUCK_PROCESS_STATES[process.state]}" if process.state in STUCK_PROCESS_STATES else ""
    step, phase = f"step: {process.step}", f"phase: {process.phase or 'spawn'}"
    who = f"Rank {process.rank} (worker {worker.index} on {worker.node}, pid {process.pid}{state})"
    return sentences(
        f"{who} has made no progress for {rank.seconds:.0f} s",
        f"Last completed {step if process.step is not None else phase}",
        start_work.describe(process.work),
    )


def hung_command(observed: Observed) -> Interruption | None:
    """A user's command of which no rank writes output within `recovery.hangTimeoutSeconds`, if that is set.

    Often only rank 0 writes output, so one rank that does shows that all make progress. All agents must report, or have
    reported that their ranks are complete: a rank that exits with code 0 too early leaves the others waiting for it.
    """
    timeout, ranks = observed.spec.recovery.hang_timeout_seconds, idle_commands(observed)
    if timeout is None or not ranks or _live_ranks(observed):
        return None
    finished = _finished_ranks(observed)
    seconds = min(rank.seconds for rank in ranks)
    if len(ranks) + len(finished) < observed.plan.layout.world_size or seconds < timeout:
        return None
    message = sentences(
        f"{_silent_ranks(ranks, finished)} written output for {seconds:.0f} s",
        describe_stuck_process(ranks),
        _describe_finished(finished),
    )
    named = min(ranks, key=lambda rank: rank.likely_cause_order)
    return Interruption(HANG, message, seconds, worker=named.worker.index, rank=named.process.rank)


def _finished_ranks(observed: Observed) -> list[int]:
    """Ranks that have exited with code 0 in the current generation, while others run."""
    by_worker = observed.plan.workers
    complete = [rank for worker in observed.workers if worker.completed for rank in by_worker[worker.index]]
    running = [received for received in observed.reports_in(AgentState.RUNNING).values() if received.fresh]
    return sorted(
        {*complete, *(one.rank for received in running for one in received.report.ranks if one.exit_code == 0)}
    )


def _silent_ranks(ranks: Sequence[IdleRank], finished: Sequence[int]) -> str:
    if not finished:
        return "No rank has"
    first = min(ranks, key=lambda rank: rank.process.rank)
    more = f" and {counted(len(ranks) - 1, 'other rank')} have" if len(ranks) > 1 else " has"
    return f"Rank {first.process.rank} (worker {first.worker.index} on {first.worker.node}){more} not"


def _describe_finished(finished: Sequence[int]) -> str:
    if not finished:
        return ""
    more = f" and {counted(len(finished) - 1, 'other rank')} have" if len(finished) > 1 else " has"
    return f"Rank {finished[0]}{more} exited with code 0 already"


def idle_commands(observed: Observed) -> list[IdleRank]:
    """The live ranks of a user's command with recent reports, and the time since they last wrote output."""
    return _fresh_ranks(observed) if isinstance(observed.run, CommandRun) else []


def describe_stuck_process(ranks: Sequence[IdleRank]) -> str:
    """The first rank whose process cannot continue, such as a stopped one; empty if there is none."""
    rank = next((rank for rank in ranks if rank.process.state in STUCK_PROCESS_STATES), None)
    if rank is None:
        return ""
    state = STUCK_PROCESS_STATES[rank.process.state]
    return f"Rank {rank.process.rank} (worker {rank.worker.index} on {rank.worker.node}) is {state}"


def silent_agents(observed: Observed) -> Interruption | None:
    """Agents that do not report while training has stopped, or whose nodes are down."""
    rule, ranks = HangRule(observed), _live_ranks(observed)
    running = [worker for worker in observed.workers if worker.state is PodState.RUNNING]
    silent = [(worker, rule.silence(worker)) for worker in running if rule.is_silent(worker)]
    if not any(report is not None and report.fresh for report in (_report(observed, worker) for worker in running)):
        return _silent_nodes(observed, silent)
    if not silent or not ranks or not all(rule.is_stalled(rank) for rank in ranks):
        return None
    named = ", ".join(f"worker {worker.index} on {worker.node} for {seconds:.0f} s" for worker, seconds in silent[:3])
    missing = f"No heartbeat from {named}, and no rank has completed a step since"
    message = sentences(missing, _replacing(len(silent)))
    return Interruption(POD_LOST, message, detected_in=silent[0][1], lost=tuple(worker for worker, _ in silent))


def _silent_nodes(observed: Observed, silent: Sequence[tuple[Worker, float]]) -> Interruption | None:
    """No agent reports: nodes that Kubernetes does not reach either are lost.

    Otherwise the operator itself is disconnected. If no node of the cluster is ready, so is Kubernetes, which evicts no
    pod then.
    """
    down = [(worker, seconds) for worker, seconds in silent if worker.node_down]
    if not down or not observed.some_node_ready:
        return None
    named = ", ".join(f"worker {worker.index} on {worker.node} for {seconds:.0f} s" for worker, seconds in down[:3])
    message = sentences(f"No heartbeat from {named}, and Kubernetes does not reach the node", _replacing(len(down)))
    return Interruption(NODE_LOST, message, detected_in=down[0][1], lost=tuple(worker for worker, _ in down))


@dataclass(frozen=True, slots=True)
class Silence:
    """Which agents of the workers that run have missed several reports."""

    agents: int
    """Number of workers that run."""
    silent: frozenset[int]
    """Those whose agents are silent."""
    oldest_seconds: float | None
    """Longest time without a report from one of them. None if no worker runs."""
    next_seconds: float | None
    """Seconds until the next agent is silent, if it does not report before. None if all are."""
    limit: float
    """Seconds without a report after which all of them count as silent."""

    @property
    def complete(self) -> bool:
        """Whether no agent reports."""
        return bool(self.silent) and len(self.silent) == self.agents


def silence(observed: Observed) -> Silence:
    """Which agents are silent. In the first `SILENT_SECONDS` after a start of the operator, none is."""
    rule, started = HangRule(observed), parse_time(observed.mesh.started_time)
    # The agent of a new pod may send its first report after the generation is formed.
    formed = (observed.now - started).total_seconds() if started is not None and started <= observed.now else inf
    running = [worker for worker in observed.workers if worker.state is PodState.RUNNING]
    seconds = {worker.index: min(formed, rule.silence(worker)) for worker in running}
    left = {worker.index: rule.silent_after(worker) - seconds[worker.index] for worker in running}
    silent = frozenset(index for index, rest in left.items() if rest <= 0)
    audible = [rest for index, rest in left.items() if index not in silent]
    return Silence(
        agents=len(seconds),
        silent=silent,
        oldest_seconds=max(seconds.values(), default=None),
        next_seconds=min(audible, default=None),
        limit=max(map(rule.silent_after, running), default=SILENT_SECONDS),
    )


def stuck_agents(observed: Observed) -> Interruption | None:
    """Agents that still report an older generation, because its ranks do not exit."""
    if seconds_since(observed.mesh.started_time, observed.now) < ADOPT_GENERATION_SECONDS:
        return None
    if observed.agents.listening_seconds < ADOPT_GENERATION_SECONDS:
        return None
    stuck = [w for w in observed.workers if w.state is PodState.RUNNING and _is_behind(observed, w)]
    if not stuck:
        return None
    named = ", ".join(f"worker {worker.index} on {worker.node}" for worker in stuck[:3])
    message = f"Ranks of an older generation than {observed.mesh.generation} do not exit: {named}"
    return Interruption(HANG, message, lost=tuple(stuck))


def _replacing(count: int) -> str:
    return "Replacing its pod" if count == 1 else "Replacing their pods"


def _live_ranks(observed: Observed) -> list[IdleRank]:
    """Live ranks of the current generation with recent reports.

    Of a user's command, those that report their steps in a file. If none does: see `hung_command`.
    """
    ranks = _fresh_ranks(observed)
    return ranks if isinstance(observed.run, NativeRun) else [rank for rank in ranks if rank.started]


def _fresh_ranks(observed: Observed) -> list[IdleRank]:
    return observed.once("fresh ranks", lambda: _find_fresh_ranks(observed))


def _find_fresh_ranks(observed: Observed) -> list[IdleRank]:
    ranks = []
    reports = observed.reports_in(AgentState.RUNNING) | observed.reports_in(AgentState.STARTING)
    for worker in observed.workers:
        received = reports.get(worker.index)
        if received is None or not received.fresh or worker.state is not PodState.RUNNING:
            continue
        live = [process for process in received.report.ranks if process.exit_code is None]
        ranks += [
            IdleRank(worker, process, known_idle_seconds(process.idle_seconds, received.age, received.interval))
            for process in live
        ]
    return ranks


def _report(observed: Observed, worker: Worker) -> ReceivedReport | None:
    received = observed.agents.reports.get(worker.index)
    return received if received is not None and received.report.incarnation == worker.incarnation else None


def _is_behind(observed: Observed, worker: Worker) -> bool:
    received = _report(observed, worker)
    return received is not None and received.fresh and received.report.generation < observed.mesh.generation
