"""Recovery in memory (`recovery.inMemory`): whether ranks hold their state, and how the next generation uses it.

Agents report what their ranks hold once a generation is interrupted. What is decided from it is in status, so that
every agent gets the same document, also after a restart of the operator.
"""

from __future__ import annotations

import re

from meshwright.api.base import MAX_SAFE_INTEGER
from meshwright.api.spec import ReplicaLossAction
from meshwright.api.status import MAX_SUCCEEDED_WORKERS, MemoryCopiesStatus, MemoryRecoveryStatus, MeshStatus
from meshwright.memory_copies import RankPlace, choose_shift, describe_survived
from meshwright.memory_recovery import cannot_continue, keeps_place, plan_recovery, reaches, unsupported
from meshwright.protocol.messages import AgentState, HeldState, MemoryRecovery, WorkerReport
from meshwright.rules.recovery_times import LOSSES
from meshwright_operator.decide import restart_policy
from meshwright_operator.decide.mesh_generation import plan_workers
from meshwright_operator.decide.observed import Observed, PodState, Worker
from meshwright_operator.decide.report_interval import heard_after
from meshwright_operator.timestamps import seconds_since

HOLD_SECONDS = 4.0
"""Time that ranks have to leave an interrupted generation; agents kill those that are in it for longer."""
_REPLICAS = re.compile(r"\bDP \d+")
"""The only part of a layout that changes with the number of replicas."""


def continues(observed: Observed) -> bool:
    """Whether ranks keep their state while replicas come and go (`recovery.onReplicaLoss: Continue`)."""
    if observed.elastic is None or not observed.elastic.recovery.in_memory:
        return False
    return observed.elastic.recovery.on_replica_loss is ReplicaLossAction.CONTINUE


def cannot_continue_why(observed: Observed) -> str:
    """Why replicas cannot continue without a lost one although the job asks for it; empty if they can."""
    return cannot_continue(observed.run) if continues(observed) else ""


def goes_on(observed: Observed, cause: str) -> bool:
    """Whether ranks go on after this cause: others are lost, or replicas come and go."""
    return cause in LOSSES or (cause == restart_policy.RESCALED.name and continues(observed))


def unavailable(observed: Observed) -> str:
    """Why the ranks of the next generation cannot hold their state although the job asks for it; empty if they can."""
    copied = observed.spec.recovery.copy_every_steps is not None
    if reason := unsupported(observed.run, copies=copied, continues=continues(observed)):
        return reason
    agents = observed.agents.waiting_agents
    if any(worker.index in agents and not agents[worker.index].holds_state for worker in observed.workers):
        return "ranks use GPUs, or the image of the workers is of a version before 0.2"
    return ""


def layout(observed: Observed) -> str | None:
    """The layout of the next generation, if its ranks hold their state when it is interrupted; else None."""
    return observed.plan.summary if observed.spec.recovery.in_memory and not unavailable(observed) else None


def copies(observed: Observed) -> MemoryCopiesStatus | None:
    """The copies that the ranks of the next generation make in host memory: on peers that are far from their own."""
    every = observed.spec.recovery.copy_every_steps
    if every is None or layout(observed) is None:
        return None
    places = _places(observed)
    shift = choose_shift(places)
    return MemoryCopiesStatus(every_steps=every, shift=shift, survives=describe_survived(places, shift))


def _places(observed: Observed) -> list[RankPlace]:
    """Where each rank runs."""
    placed = {entry.worker: entry for entry in observed.status.placement.workers} if observed.status.placement else {}
    known, places = plan_workers(observed), []
    for worker in sorted(observed.workers, key=lambda worker: known.get(worker.index, -1)):
        entry = placed.get(worker.index)
        where = (entry.node, entry.domain, entry.rack) if entry is not None else (worker.node, "", "")
        ranks = observed.plan.workers[known[worker.index]]
        places += [RankPlace(worker.index, *where)] * len(ranks)
    return places


def leaves(observed: Observed, mesh: MeshStatus) -> bool:
    """Whether the ranks of the generation leave it, to go on in the next one.

    While a pod terminates, all ranks stop after the same step and save a checkpoint, as without recovery in memory.
    """
    ending = any(worker.state is PodState.ENDING for worker in observed.workers)
    return bool(mesh.in_memory) and goes_on(observed, mesh.pending_cause) and not ending


def pauses(observed: Observed, pending_cause: str) -> bool:
    """Whether the ranks of the generation save a checkpoint and stop, and do not hold their state."""
    in_memory = bool(observed.mesh.in_memory) and goes_on(observed, pending_cause)
    return restart_policy.cause_named(pending_cause).pauses and not in_memory


def leaving(observed: Observed, pending_cause: str) -> int:
    """The number of workers whose ranks have not left the interrupted generation yet, as long as they may take."""
    if not observed.mesh.in_memory or not goes_on(observed, pending_cause):
        return 0
    waited = seconds_since(observed.mesh.pending_since, observed.now)
    if waited >= HOLD_SECONDS + _late_seconds(observed, pending_cause):
        return 0
    return sum(worker.state is PodState.RUNNING and _may_leave(worker, observed) for worker in observed.workers)


def _late_seconds(observed: Observed, pending_cause: str) -> float:
    """How long a report that ranks have left may be late. Without it, their worker gets the state of others instead."""
    if pending_cause in LOSSES:  # the silent worker is probably lost, too
        return _unheard_seconds(observed)
    return max(_unheard_seconds(observed), heard_after(len(observed.workers)))


def _unheard_seconds(observed: Observed) -> float:
    """How long agents may not have known that they have to leave, because the operator has started anew since."""
    pending, listening = seconds_since(observed.mesh.pending_since, observed.now), observed.agents.listening_seconds
    return 0.0 if listening >= pending else pending - listening + heard_after(len(observed.workers))


def _may_leave(worker: Worker, observed: Observed) -> bool:
    """Whether a worker's ranks may still be in the interrupted generation: its agent has not said that they left."""
    received, polls = observed.agents.reports.get(worker.index), observed.agents.waiting_agents.get(worker.index)
    if received is None or received.report.incarnation != worker.incarnation:
        return False
    number, current = received.report.generation, observed.mesh.generation
    if number != current:
        # Its last report is from before it received the document.
        return number < current and polls is not None and polls.generation == current
    return received.report.state in (AgentState.STARTING, AgentState.RUNNING)


def holding(observed: Observed) -> dict[int, HeldState]:
    """Rank -> the state that its process holds since the current generation was interrupted, or an earlier one."""
    return {rank: state for _, states in _held_by_worker(observed) for rank, state in states.items()}


def _held_by_worker(observed: Observed) -> list[tuple[int, dict[int, HeldState]]]:
    """Of each worker whose ranks hold a state of use: the generation since which they hold it, and rank -> state."""
    known, ranks_by_worker = plan_workers(observed), observed.plan.workers
    found = []
    for worker in observed.workers:
        received = observed.agents.reports.get(worker.index)
        if received is None or worker.index not in known:
            continue
        since = _held_since(worker, received.report, observed)
        if since is None:
            continue
        numbers = _numbers(observed, received.report, ranks_by_worker[known[worker.index]])
        states = {
            numbers[rank.rank]: rank.held
            for rank in received.report.ranks
            if rank.held is not None
            and rank.rank in numbers
            and 0 <= rank.held.step <= MAX_SAFE_INTEGER
            and _still_counts(rank.held, since, observed.mesh)
        }
        if states:
            found.append((since, states))
    return found


def _numbers(observed: Observed, report: WorkerReport, own: range) -> dict[int, int]:
    """The ranks of a worker in the interrupted generation -> those in the next one, `own`, for which it has the state.

    They differ if replicas came or went. The processes of a worker go on in their order.
    """
    before = sorted(rank.rank for rank in report.ranks)
    if not continues(observed) or len(before) != len(own):
        return {rank: rank for rank in own}
    return {old: new for old, new in zip(before, own, strict=True) if keeps_place(observed.run, old, new)}


def _held_since(worker: Worker, report: WorkerReport, observed: Observed) -> int | None:
    """The generation since which a worker's ranks hold their state, if they do. None if that is of no use.

    That may be an earlier one than the interrupted generation, of which the agent never got the document: without its
    ranks, that one made no step. The agent's poll says which document it has; its last report may be older.
    """
    mesh = observed.mesh
    if worker.state is not PodState.RUNNING or report.incarnation != worker.incarnation:
        return None
    if report.generation == mesh.generation:
        return mesh.generation
    polls = observed.agents.waiting_agents.get(worker.index)
    if mesh.recovery is None or polls is None or polls.generation != report.generation:
        return None
    return report.generation if mesh.recovery.generation <= report.generation < mesh.generation else None


def _still_counts(held: HeldState, since: int, mesh: MeshStatus) -> bool:
    """Whether the others, which wait in the interrupted generation, have the same step as this state or can reach it.

    If all went back to copies, the next generation may do so again.
    """
    recovery = mesh.recovery
    return since == mesh.generation or recovery is None or recovery.holders is not None or reaches(held, recovery.step)


def plan(observed: Observed, pending_cause: str) -> MemoryRecovery | str | None:
    """How the next generation goes on from states in memory; why it cannot; None if its ranks start anyway."""
    mesh = observed.mesh
    if not mesh.in_memory or not goes_on(observed, pending_cause) or not observed.spec.recovery.in_memory:
        return None
    if not _has_layout(observed, mesh.in_memory):
        why = cannot_continue_why(observed)
        return f"the layout changes from {mesh.in_memory} to {observed.plan.summary}{f', and {why}' if why else ''}"
    earliest = min((since for since, _ in _held_by_worker(observed)), default=mesh.generation)
    recovery = plan_recovery(observed.run, earliest, holding(observed))
    if isinstance(recovery, MemoryRecovery) and _is_long(recovery):
        return "too many separate ranks are lost"
    return recovery


def _has_layout(observed: Observed, before: str) -> bool:
    """Whether ranks of a generation with the layout `before` can go on in the next one."""
    following = layout(observed)
    if following is None or following == before or not continues(observed) or cannot_continue(observed.run):
        return following == before
    return _REPLICAS.sub("", following) == _REPLICAS.sub("", before)


def _is_long(recovery: MemoryRecovery) -> bool:
    return max(len(recovery.ranks), len(recovery.holders or "")) > MAX_SUCCEEDED_WORKERS


def progresses(observed: Observed, pending_cause: str) -> bool:
    """Whether the next generation goes on from a later step than the current one: its start then needs no back-off."""
    recovery = plan(observed, pending_cause)
    before = observed.mesh.recovery.step if observed.mesh.recovery is not None else 0
    return isinstance(recovery, MemoryRecovery) and recovery.step > before


def to_status(recovery: MemoryRecovery) -> MemoryRecoveryStatus:
    """The recovery as it is persisted."""
    return MemoryRecoveryStatus(
        generation=recovery.generation,
        step=recovery.step,
        leader=recovery.leader,
        ranks=recovery.ranks,
        holders=recovery.holders,
    )
