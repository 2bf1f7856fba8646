"""The cost of fragmentation: how much less an empty cluster would cost, and which nodes to free for a job."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.placement.capacity import FreeCapacity, GangShape, why_too_small
from meshwright.planner.placement.fit_error import fits
from meshwright.planner.placement.group_levels import GroupLevels, with_nodes_as_level
from meshwright.planner.placement.options import PlacingOptions
from meshwright.planner.placement.place import place
from meshwright.planner.placement.result import Placement
from meshwright.planner.plan import Plan

_QUICK = PlacingOptions(effort=50_000)
_MAX_LOCATIONS = 64
"""So many locations, those with fewest GPUs in use, are tried for nodes to free."""
_MAX_TRIALS = 64
"""So many nodes to free, those with most GPUs in use, are tried without."""


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
    on_empty_nodes = place(placement.plan, inventory.emptied(), options=options, previous=placement.nodes)
    return max(0.0, placement.cost - on_empty_nodes.cost)


def nodes_to_free(plan: Plan, inventory: Inventory) -> NodesToFree | None:
    """The nodes to free for a plan that does not fit: those that add most capacity for the fewest GPUs in use.

    None if the plan fits, and if it would not fit on an empty cluster either. With levels that groups must not leave,
    few GPUs in use, but not always the fewest: trials of `fits` decide then.
    """
    levels = GroupLevels.of(plan, inventory.levels)
    if levels.required:
        return _within_levels(plan, inventory, levels)
    blocks = GangShape(plan).blocks
    now, empty = FreeCapacity(plan, inventory, {}), FreeCapacity(plan, inventory.emptied(), {})
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


def _within_levels(plan: Plan, inventory: Inventory, levels: GroupLevels) -> NodesToFree | None:
    """As `nodes_to_free`, for a plan with required levels.

    The nodes to free are all in one location of a required level if that helps, or anywhere. Of every choice, nodes
    without which the plan fits too are left out.
    """
    if fits(plan, inventory) or not fits(plan, inventory.emptied()):
        return None
    in_use = {
        node.name: used
        for node in inventory.usable
        if (used := node.capacity.gpus - node.free.gpus) > 0 and not why_too_small(plan, node)
    }

    def enough(names: Sequence[str]) -> bool:
        return fits(plan, inventory.emptied(names))

    everywhere = sorted(in_use, key=lambda name: (in_use[name], name))
    locations: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for level in {rule.level for rule in levels.required} & set(inventory.levels):
        for name in everywhere:
            locations[level, inventory.nodes[name].place.at(level)].append(name)
    by_use = sorted(locations, key=lambda at: (sum(in_use[name] for name in locations[at]), at))
    scopes = [everywhere, *(locations[at] for at in by_use[:_MAX_LOCATIONS])]
    choices = [_needed(names, enough) for names in scopes if enough(names)]
    if not choices:
        return None
    chosen = min(choices, key=lambda names: (sum(in_use[name] for name in names), len(names), names))
    if levels.names_nodes:
        inventory = with_nodes_as_level(inventory)
    now = FreeCapacity(plan, inventory, {}, levels.base)
    then = FreeCapacity(plan, inventory.emptied(chosen), {}, levels.base)
    workers = (then.total_blocks() - now.total_blocks()) * now.block_workers
    return NodesToFree(chosen, sum(in_use[name] for name in chosen), workers)


def _needed(names: Sequence[str], enough: Callable[[Sequence[str]], bool]) -> list[str]:
    """The shortest beginning of these names that is enough, without those that are not needed, sorted."""
    count = bisect_left(range(len(names) + 1), True, key=lambda number: enough(names[:number]))
    chosen = [*names[:count]]
    for name in reversed(names[max(0, count - _MAX_TRIALS) : count]):
        without = [one for one in chosen if one != name]
        chosen = without if enough(without) else chosen
    return sorted(chosen)
