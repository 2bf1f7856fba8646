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
from meshwright.memory_recovery import cannot_continue, keeps_place, plan_recovery, unsupported
from meshwright.protocol.messages import AgentState, HeldState, MemoryRecovery, WorkerReport
from meshwright.rules.recovery_times import LOSSES
from meshwright_operator.decide import restart_policy
from meshwright_operator.decide.mesh_generation import plan_workers
from meshwright_operator.decide.observed import Observed, PodState, Worker
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
    if seconds_since(observed.mesh.pending_since, observed.now) >= HOLD_SECONDS:
        return 0
    busy = (AgentState.STARTING, AgentState.RUNNING)
    return sum(
        worker.state is PodState.RUNNING
        and (received := observed.agents.reports.get(worker.index)) is not None
        and (received.report.incarnation, received.report.generation) == (worker.incarnation, observed.mesh.generation)
        and received.report.state in busy
        for worker in observed.workers
    )


def holding(observed: Observed) -> dict[int, HeldState]:
    """Rank -> the state that its process holds since the current generation was interrupted."""
    known, ranks_by_worker = plan_workers(observed), observed.plan.workers
    held: dict[int, HeldState] = {}
    for worker in observed.workers:
        received = observed.agents.reports.get(worker.index)
        if received is None or worker.index not in known or not _is_current(worker, observed):
            continue
        numbers = _numbers(observed, received.report, ranks_by_worker[known[worker.index]])
        held |= {
            numbers[rank.rank]: rank.held
            for rank in received.report.ranks
            if rank.held is not None and rank.rank in numbers and 0 <= rank.held.step <= MAX_SAFE_INTEGER
        }
    return held


def _numbers(observed: Observed, report: WorkerReport, own: range) -> dict[int, int]:
    """The ranks of a worker in the interrupted generation -> those in the next one, `own`, for which it has the state.

    They differ if replicas came or went. The processes of a worker go on in their order.
    """
    before = sorted(rank.rank for rank in report.ranks)
    if not continues(observed) or len(before) != len(own):
        return {rank: rank for rank in own}
    return {old: new for old, new in zip(before, own, strict=True) if keeps_place(observed.run, old, new)}


def _is_current(worker: Worker, observed: Observed) -> bool:
    report = observed.agents.reports[worker.index].report
    current = worker.incarnation, observed.mesh.generation
    return worker.state is PodState.RUNNING and (report.incarnation, report.generation) == current


def plan(observed: Observed, pending_cause: str) -> MemoryRecovery | str | None:
    """How the next generation goes on from states in memory; why it cannot; None if its ranks start anyway."""
    mesh = observed.mesh
    if not mesh.in_memory or not goes_on(observed, pending_cause) or not observed.spec.recovery.in_memory:
        return None
    if not _has_layout(observed, mesh.in_memory):
        why = cannot_continue_why(observed)
        return f"the layout changes from {mesh.in_memory} to {observed.plan.summary}{f', and {why}' if why else ''}"
    recovery = plan_recovery(observed.run, mesh.generation, holding(observed))
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
