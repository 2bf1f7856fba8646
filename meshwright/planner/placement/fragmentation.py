"""What other jobs' leftovers cost: how much cheaper an empty cluster would be, and which nodes to free for room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.planner.inventory import Inventory
from meshwright.planner.placement.options import PlacingOptions
from meshwright.planner.placement.place import place
from meshwright.planner.placement.result import Placement
from meshwright.planner.plan import Plan
from meshwright.planner.room import Room, Shape, too_small

_QUICK = PlacingOptions(effort=50_000)


@dataclass(frozen=True, slots=True)
class ToFree:
    """Nodes whose pods, moved elsewhere, would make room.

    Attributes:
        nodes: the nodes, in order of their names.
        gpus: GPUs that pods hold on them now.
        workers: how many more workers would find a place.
    """

    nodes: Sequence[str]
    gpus: int
    workers: int


def cost_of_fragmentation(placement: Placement, inventory: Inventory, options: PlacingOptions = _QUICK) -> float:
    """What the placement costs more than one on the same nodes with nothing else on them; at least 0."""
    alone = place(placement.plan, _emptied(inventory), options=options, previous=placement.nodes)
    return max(0.0, placement.cost - alone.cost)


def nodes_to_free(plan: Plan, inventory: Inventory) -> ToFree | None:
    """The nodes to free for a plan that has no room: those that give most for the fewest GPUs in use.

    None when it has room, and when even the empty cluster would have too little.
    """
    blocks = Shape(plan).blocks
    now, empty = Room(plan, inventory, {}), Room(plan, _emptied(inventory), {})
    missing = blocks - now.total_blocks()
    if missing <= 0 or empty.total_blocks() < blocks:
        return None
    held: Counter[str] = Counter()
    members: dict[str, list[str]] = {}
    for node in inventory.usable:
        used = node.capacity.gpus - node.free.gpus
        if used > 0 and not too_small(plan, node):
            held[node.place.domain] += used
            members.setdefault(node.place.domain, []).append(node.name)
    gains = {domain: empty.blocks(domain) - now.blocks(domain) for domain in members}
    ranked = sorted((d for d in gains if gains[d] > 0), key=lambda d: (held[d] / gains[d], d))
    chosen: list[str] = []
    for domain in ranked:
        if missing <= 0:
            break
        chosen.append(domain)
        missing -= gains[domain]
    workers = sum(gains[domain] for domain in chosen) * now.block_workers
    if missing > 0:
        return None
    return ToFree(sorted(n for d in chosen for n in members[d]), sum(held[d] for d in chosen), workers)


def _emptied(inventory: Inventory) -> Inventory:
    return replace(inventory, nodes={name: replace(n, free=n.capacity) for name, n in inventory.nodes.items()})
