"""Chooses spare nodes where they are needed: in the closest location shared with the workers they would replace.

A spare node in the rack of the failed worker preserves the crossings of every group. A spare elsewhere does not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.placement.capacity import why_too_small
from meshwright.planner.placement.result import Placement


def with_spares(placement: Placement, inventory: Inventory, count: int) -> Placement:
    """Return the placement with up to `count` spare nodes, and with a note if there are fewer.

    Raises:
        ValueError: `count` is negative.
    """
    spares = tuple(spare_nodes(placement, inventory, count))
    fewer_note = f"{len(spares)} of {count} spare nodes reserved: a worker fits on no other free node"
    notes = (*placement.notes, fewer_note) if len(spares) < count else placement.notes
    return replace(placement, spares=spares, notes=notes)


def spare_nodes(placement: Placement, inventory: Inventory, count: int) -> list[str]:
    """Return up to `count` nodes to reserve, the most useful first.

    Nodes with a worker of the job are excluded, because spare and worker would be lost together. Each spare is the node
    that shares a location with most workers per spare, compared at the closest level first. Racks therefore get spares
    in proportion to their workers. Of equal nodes the fullest is chosen, so that empty nodes stay empty for other jobs.

    Raises:
        ValueError: `count` is negative.
    """
    if count < 0:
        raise ValueError(f"`count` is {count}: it must be 0 or more")
    plan = placement.plan
    workers_by_node = Counter(placement.nodes.values())
    workers_that_fit = {
        node.name: node.free.fits(plan.worker_request)
        for node in inventory.usable
        if not workers_by_node[node.name] and not why_too_small(plan, node)
    }
    candidates = [name for name, count_that_fits in workers_that_fit.items() if count_that_fits > 0]
    levels = inventory.levels
    workers = Counter((level, place.at(level)) for place in placement.places.values() for level in levels)
    spares: Counter[tuple[str, str]] = Counter()
    chosen: list[str] = []

    def usefulness(name: str) -> tuple[tuple[float, ...], int, str]:
        at = [(level, inventory.nodes[name].place.at(level)) for level in levels]
        return tuple(-workers[key] / (spares[key] + 1) for key in at), workers_that_fit[name], name

    while candidates and len(chosen) < count:
        best = min(candidates, key=usefulness)
        candidates.remove(best)
        chosen.append(best)
        spares.update((level, inventory.nodes[best].place.at(level)) for level in levels)
    return chosen
