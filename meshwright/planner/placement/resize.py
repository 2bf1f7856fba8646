"""Which worker runs which ranks after the number of replicas has changed.

A rank's shard depends only on its coordinates in the mesh, and replicas are interchangeable. So a worker that goes on
keeps its ranks if their replica is complete and still exists; workers of replicas that end, or that lost workers, fill
the gaps of others, at the same stage if possible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshwright.planner.placement.capacity import GangShape
from meshwright.planner.plan import Plan


def workers_on_resize(old: Plan, new: Plan, running: Mapping[int, int]) -> dict[int, int]:
    """Assign the workers that run to the workers of a plan with another number of replicas.

    Tensor-parallel groups of several workers are moved as a whole, because they must stay in one NVLink domain. With
    `topology`, only complete replicas are moved.

    Args:
        old: the previous plan.
        new: the next plan.
        running: worker -> its worker in the previous plan.

    Returns:
        Worker -> its worker in the next plan. Workers that are left out are not needed. If the degrees differ, every
        rank has other shards, and the workers are numbered in their previous order.
    """
    before, after = GangShape(old), GangShape(new)
    if _degrees(old) != _degrees(new):
        in_order = sorted(running, key=lambda worker: running[worker])
        return dict(zip(in_order, range(after.workers), strict=False))
    blocks = _blocks(running, before.block_workers)
    size = before.segment_blocks
    assigned: dict[int, int] = {}  # block of the new plan -> block of the old plan
    complete = [s for s in range(before.segments) if all(s * size + b in blocks for b in range(size))]
    surplus = [segment for segment in complete if segment >= after.segments]
    for segment in range(after.segments):
        source = segment if segment in complete else surplus.pop(0) if surplus else None
        if source is not None:
            assigned |= {segment * size + block: source * size + block for block in range(size)}
    used = set(assigned.values())
    rest = [block for block in sorted(blocks) if block not in used]
    # Blocks of two replicas may be in different locations of a level that a replica must not leave.
    matches = _MATCHES[:1] if new.topology is not None else _MATCHES
    for same in matches:
        for target in range(after.blocks):
            if target not in assigned and (match := next((b for b in rest if same(b, target, size)), None)) is not None:
                assigned[target] = match
                rest.remove(match)
    return {
        worker: target * after.block_workers + offset
        for target, source in assigned.items()
        for offset, worker in enumerate(blocks[source])
    }


_MATCHES: tuple[Callable[[int, int, int], bool], ...] = (
    lambda old, new, size: old == new,
    lambda old, new, size: old % size == new % size,
    lambda old, new, size: True,
)
"""Which block of the old plan may become a block of the new one, for blocks per replica, the best first."""


def _degrees(plan: Plan) -> tuple[int, ...]:
    layout = plan.layout
    return layout.tensor, layout.pipeline, layout.context, plan.gpus_per_worker


def _blocks(running: Mapping[int, int], size: int) -> dict[int, list[int]]:
    """Block of the plan -> its workers in order, of the blocks all of whose workers run."""
    found: dict[int, dict[int, int]] = {}
    for worker, plan_worker in running.items():
        block, offset = divmod(plan_worker, size)
        found.setdefault(block, {})[offset] = worker
    return {
        block: [members[offset] for offset in range(size)] for block, members in found.items() if len(members) == size
    }
