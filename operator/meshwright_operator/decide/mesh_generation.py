"""Mesh generations: which ranks each worker runs, the next generation, and the document that agents receive.

A worker of a job that the operator places runs the ranks of its index. If another scheduler places the pods
(`workers.schedulerName`), their ranks are known only once all of them are bound, and `status.placement` records them.
It also records the ranks of an elastic job's workers, which change with the job's size.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.addresses import join_host_port, split_host_port
from meshwright.api.status import FailureStatus, MeshStatus, parse_ranks
from meshwright.protocol.messages import (
    MAX_GENERATION,
    CheckpointCommit,
    FailureHistory,
    MemoryCopies,
    MemoryRecovery,
    MeshDocument,
    MeshMember,
    WorkerReport,
    run_version_of,
)
from meshwright.protocol.run_config import CommandRun
from meshwright_operator.decide import replica_groups
from meshwright_operator.decide.observed import Observed
from meshwright_operator.timestamps import format_time


def uses_external_scheduler(observed: Observed) -> bool:
    """Whether another scheduler places the job's pods."""
    return observed.spec.workers.scheduler_name is not None


def plan_workers(observed: Observed) -> Mapping[int, int]:
    """Worker -> worker of the plan whose ranks it runs. Workers without known ranks are left out."""
    return observed.once("plan workers", lambda: _plan_workers(observed))


def _plan_workers(observed: Observed) -> dict[int, int]:
    external = uses_external_scheduler(observed)
    placement = observed.status.placement
    if not external and (observed.elastic is None or placement is None):
        return {worker.index: worker.index for worker in observed.workers}
    entries = {entry.worker: entry for entry in placement.workers} if placement is not None else {}
    first = {ranks.start: plan_worker for plan_worker, ranks in enumerate(observed.plan.workers)}
    assigned: dict[int, int] = {}
    taken: set[int] = set()
    for worker in observed.workers:
        entry = entries.get(worker.index)
        if entry is None:
            continue
        if external and (entry.incarnation, entry.node) != (worker.incarnation, worker.node):
            continue
        ranks = parse_ranks(entry.ranks)
        plan_worker = first.get(ranks.start) if ranks is not None else None
        if plan_worker is not None and plan_worker not in taken:
            assigned[worker.index] = plan_worker
            taken.add(plan_worker)
    return assigned


def rank_zero_worker(observed: Observed) -> int:
    """The worker that runs rank 0."""
    return next((worker for worker, plan_worker in plan_workers(observed).items() if plan_worker == 0), 0)


def rank_zero_report(observed: Observed) -> WorkerReport | None:
    """The last report about rank 0 of the current generation, or of the one that has ended last.

    After a resize or a move another worker runs rank 0, while the one of the ended generation still saves a checkpoint.
    """
    reports = observed.agents.reports
    received = reports.get(rank_zero_worker(observed))
    if observed.mesh.pending_cause:
        of_rank_zero = (r for r in reports.values() if any(rank.rank == 0 for rank in r.report.ranks))
        received = next((r for r in of_rank_zero if r.report.generation == observed.mesh.generation), received)
    current = received is not None and received.report.generation == observed.mesh.generation
    return received.report if received is not None and current else None


def next_generation(observed: Observed, cause: str, failures: int) -> MeshStatus:
    """The next generation: its number is above every number in status or in an agent's report.

    A number that agents cannot receive, which only a damaged status has, does not count. Every worker must run and its
    agent must poll. The agent of rank 0 has reserved the store's port. `failures` is the number of consecutive failures
    so far.
    """
    first = rank_zero_worker(observed)
    master = next(worker.pod for worker in observed.workers if worker.index == first)
    waiting_agent = observed.agents.waiting_agents[first]
    assert master is not None
    numbers = (observed.mesh.generation, observed.agents.newest_generation)
    number = max((number for number in numbers if number < MAX_GENERATION), default=0) + 1
    groups = replica_groups.next_groups(observed, plan_workers(observed), number, cause)
    return MeshStatus(
        generation=number,
        master=join_host_port(master.address, waiting_agent.store_port) if groups is None else groups.groups[0].master,
        replica_groups=groups,
        started_time=format_time(observed.now),
        cause=cause,
        failures=failures,
    )


def document(
    observed: Observed,
    mesh: MeshStatus,
    failure: FailureStatus | None = None,
    history: FailureHistory | None = None,
) -> MeshDocument | None:
    """The document of the current generation, from the persisted status and the pods' addresses.

    `failure` is the latest one in the status: it may be why this generation was formed. `history` has all of them, if
    ranks need it.

    None while there is no current generation, or if a pod or its address is not known.
    """
    if mesh.generation == 0 or mesh.pending_cause:
        return None
    try:
        address, port = split_host_port(mesh.master)
        groups = replica_groups.groups_of(observed, mesh)
    except ValueError:
        return None
    if (members := _members(observed)) is None:
        return None
    return MeshDocument(
        generation=mesh.generation,
        world_size=observed.plan.layout.world_size,
        master_address=address,
        master_port=port,
        members=members,
        hung_rank=_hung_rank(failure, mesh),
        run=observed.run,
        numa_binding=None if observed.spec.preflight is None or observed.spec.preflight.numa_binding else False,
        environment=dict(observed.plan.environment) or None,
        resume=_resume(observed),
        run_version=run_version_of(observed.run, groups),
        replica_groups=groups,
        max_restarts=observed.spec.recovery.max_restarts if isinstance(observed.run, CommandRun) else None,
        in_memory=bool(mesh.in_memory) or None,
        node_check=mesh.node_check or None,
        copies=_copies(mesh),
        memory=_memory(mesh),
        history=history,
        image=_image(observed),
    )


def _members(observed: Observed) -> list[MeshMember] | None:
    """The workers in the order of their ranks; None if a pod or its address is not known."""
    members, known, ranks_by_worker = [], plan_workers(observed), observed.plan.workers
    for worker in sorted(observed.workers, key=lambda worker: known.get(worker.index, -1)):
        if worker.pod is None or not worker.pod.address or worker.index not in known:
            return None
        ranks = ranks_by_worker[known[worker.index]]
        members.append(
            MeshMember(
                worker=worker.index,
                incarnation=worker.incarnation,
                address=worker.pod.address,
                first_rank=ranks.start,
                ranks=len(ranks),
            )
        )
    return members


def _resume(observed: Observed) -> CheckpointCommit | None:
    """The newest checkpoint that the user's command has reported. Meshwright's runtime finds its own."""
    saved = observed.status.checkpoint
    if saved is None or not isinstance(observed.run, CommandRun):
        return None
    return CheckpointCommit(step=saved.step, time=saved.time, path=saved.path)


def _image(observed: Observed) -> str | None:
    """The image of rank 0, if checkpoints record it."""
    first = rank_zero_worker(observed)
    pod = next((worker.pod for worker in observed.workers if worker.index == first), None)
    return pod.image or None if pod is not None and observed.spec.checkpoint is not None else None


def _copies(mesh: MeshStatus) -> MemoryCopies | None:
    copies = mesh.copies
    return MemoryCopies(every_steps=copies.every_steps, shift=copies.shift) if copies is not None else None


def _memory(mesh: MeshStatus) -> MemoryRecovery | None:
    recovery = mesh.recovery
    if recovery is None:
        return None
    return MemoryRecovery(
        generation=recovery.generation,
        step=recovery.step,
        leader=recovery.leader,
        ranks=recovery.ranks,
        holders=recovery.holders,
    )


def _hung_rank(failure: FailureStatus | None, mesh: MeshStatus) -> int | None:
    """The rank of the previous generation that hung, if that is why this one was formed."""
    if failure is None or failure.cause != mesh.cause or failure.generation >= mesh.generation:
        return None
    return failure.rank
