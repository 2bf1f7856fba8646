"""Mesh generations: forming the next one, and the document that tells agents about the one in effect."""

from __future__ import annotations

from meshwright.api.status import MeshStatus
from meshwright.protocol.messages import MeshDocument, MeshMember
from meshwright_operator.decide.observed import Observed
from meshwright_operator.decide.rank_assignment import rank_zero_worker, slots
from meshwright_operator.timestamps import format_time


def next_generation(observed: Observed, cause: str, failures: int) -> MeshStatus:
    """The next generation: one more than any that status or an agent ever named; rank 0's agent holds its store port.

    Every worker must run and have said hello. `failures` are those in a row so far.
    """
    first = rank_zero_worker(observed)
    master = observed.workers[first].pod
    waiting_agent = observed.agents.waiting_agents[first]
    assert master is not None
    return MeshStatus(
        generation=max(observed.mesh.generation, observed.agents.newest_generation) + 1,
        master=f"{master.address}:{waiting_agent.store_port}",
        started_time=format_time(observed.now),
        cause=cause,
        failures=failures,
    )


def document(observed: Observed, mesh: MeshStatus) -> MeshDocument | None:
    """The document of the generation in effect, from what is persisted and the pods' addresses.

    None while no generation is in effect, or when a pod or address is not known (any more).
    """
    address, _, port = mesh.master.rpartition(":")
    if mesh.generation == 0 or mesh.pending_cause or not port.isdigit():
        return None
    members, known = [], slots(observed)
    for worker in sorted(observed.workers, key=lambda worker: known.get(worker.index, -1)):
        if worker.pod is None or not worker.pod.address or worker.index not in known:
            return None
        ranks = observed.plan.workers[known[worker.index]]
        members.append(
            MeshMember(
                worker=worker.index,
                incarnation=worker.incarnation,
                address=worker.pod.address,
                first_rank=ranks.start,
                ranks=len(ranks),
            )
        )
    return MeshDocument(
        generation=mesh.generation,
        world_size=observed.plan.layout.world_size,
        master_address=address,
        master_port=int(port),
        members=members,
        run=observed.run,
    )
