"""Spare nodes where they are needed: inside the closest place that also holds the workers they would replace.

A spare in the rack of the worker that fails keeps every group's crossings as they are; one elsewhere does not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.placement.capacity import why_too_small
from meshwright.planner.placement.result import Placement


def with_spares(placement: Placement, inventory: Inventory, count: int) -> Placement:
    """The placement with up to `count` spare nodes, and a note where there are fewer.

    Raises:
        ValueError: `count` is negative.
    """
    spares = tuple(spare_nodes(placement, inventory, count))
    fewer_note = f"{len(spares)} of {count} spare nodes: no more are free and hold a worker"
    notes = (*placement.notes, fewer_note) if len(spares) < count else placement.notes
    return replace(placement, spares=spares, notes=notes)


def spare_nodes(placement: Placement, inventory: Inventory, count: int) -> list[str]:
    """Up to `count` nodes to keep free, the most useful first.

    Nodes that hold a worker of the job are none: they would be lost together. Each is the node that most workers per
    spare share a place with, the closest level first (so racks get spares in proportion to the workers they hold);
    between equal ones the fullest, so that whole nodes stay whole for others.

    Raises:
        ValueError: `count` is negative.
    """
    if count < 0:
        raise ValueError(f"`count` is {count}: it must be 0 or more")
    plan = placement.plan
    workers_by_node = Counter(placement.nodes.values())
    free_slots = {
        node.name: node.free.fits(plan.worker_request)
        for node in inventory.usable
        if not workers_by_node[node.name] and not why_too_small(plan, node)
    }
    candidates = [name for name, places in free_slots.items() if places > 0]
    levels = inventory.levels
    workers = Counter((level, place.at(level)) for place in placement.places.values() for level in levels)
    spares: Counter[tuple[str, str]] = Counter()
    chosen: list[str] = []

    def usefulness(name: str) -> tuple[tuple[float, ...], int, str]:
        at = [(level, inventory.nodes[name].place.at(level)) for level in levels]
        return tuple(-workers[key] / (spares[key] + 1) for key in at), free_slots[name], name

    while candidates and len(chosen) < count:
        best = min(candidates, key=usefulness)
        candidates.remove(best)
        chosen.append(best)
        spares.update((level, inventory.nodes[best].place.at(level)) for level in levels)
    return chosen
