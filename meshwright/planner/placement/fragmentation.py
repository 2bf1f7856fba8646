"""The cost of fragmentation: how much less an empty cluster would cost, and which nodes to free for a job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.placement.capacity import FreeCapacity, GangShape, why_too_small
from meshwright.planner.placement.group_levels import GroupLevels
from meshwright.planner.placement.options import PlacingOptions
from meshwright.planner.placement.place import place
from meshwright.planner.placement.result import Placement
from meshwright.planner.plan import Plan

_QUICK = PlacingOptions(effort=50_000)


@dataclass(frozen=True, slots=True)
class NodesToFree:
    """Nodes where workers would fit if the pods on them were moved elsewhere.

    Attributes:
        nodes: the nodes, sorted by name.
        gpus: number of GPUs that pods occupy on them now.
        workers: how many more workers would fit.
    """

    nodes: Sequence[str]
    gpus: int
    workers: int


def cost_of_fragmentation(placement: Placement, inventory: Inventory, options: PlacingOptions = _QUICK) -> float:
    """The cost of a placement minus that of a placement on the same nodes without other pods. At least 0."""
    on_empty_nodes = place(placement.plan, _emptied(inventory), options=options, previous=placement.nodes)
    return max(0.0, placement.cost - on_empty_nodes.cost)


def nodes_to_free(plan: Plan, inventory: Inventory) -> NodesToFree | None:
    """The nodes to free for a plan that does not fit: those that add most capacity for the fewest GPUs in use.

    None if the plan fits, if it would not fit on an empty cluster either, and if it has levels that groups must not
    leave: then not only the number of free GPUs counts.
    """
    if GroupLevels.of(plan, inventory.levels).required:
        return None
    blocks = GangShape(plan).blocks
    now, empty = FreeCapacity(plan, inventory, {}), FreeCapacity(plan, _emptied(inventory), {})
    missing = blocks - now.total_blocks()
    if missing <= 0 or empty.total_blocks() < blocks:
        return None
    gpus_in_use: Counter[str] = Counter()
    members: dict[str, list[str]] = {}
    for node in inventory.usable:
        used = node.capacity.gpus - node.free.gpus
        if used > 0 and not why_too_small(plan, node):
            gpus_in_use[node.place.domain] += used
            members.setdefault(node.place.domain, []).append(node.name)
    blocks_gained = {domain: empty.blocks(domain) - now.blocks(domain) for domain in members}
    ranked = sorted(
        (d for d in blocks_gained if blocks_gained[d] > 0), key=lambda d: (gpus_in_use[d] / blocks_gained[d], d)
    )
    chosen: list[str] = []
    for domain in ranked:
        if missing <= 0:
            break
        chosen.append(domain)
        missing -= blocks_gained[domain]
    workers = sum(blocks_gained[domain] for domain in chosen) * now.block_workers
    if missing > 0:
        return None
    return NodesToFree(sorted(n for d in chosen for n in members[d]), sum(gpus_in_use[d] for d in chosen), workers)


def _emptied(inventory: Inventory) -> Inventory:
    return replace(inventory, nodes={name: replace(n, free=n.capacity) for name, n in inventory.nodes.items()})
