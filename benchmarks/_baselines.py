"""How others place the same job: the choices of node and rank order of four schedulers, on the same free nodes."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable

from meshwright.planner.cluster.inventory import Inventory

Baseline = Callable[[int, Inventory, random.Random], list[str]]
"""(number of nodes, inventory, randomness) -> node of each worker, by worker index."""


def at_random(count: int, inventory: Inventory, draw: random.Random) -> list[str]:
    """Any free nodes, in any order."""
    return draw.sample(sorted(inventory.nodes), count)


def best_fit_by_index(count: int, inventory: Inventory, draw: random.Random) -> list[str]:
    """Kueue's best fit (TAS): level by level the roomiest domains, the last one the tightest that still fits; pod
    indices follow the domains in order.
    """
    del draw
    by_spine: defaultdict[str, int] = defaultdict(int)
    for nodes in _racks(inventory, None).values():
        by_spine[_spine(inventory, nodes[0])] += len(nodes)
    placed: list[str] = []
    for spine, share in _split(count, by_spine):
        for rack, taken in _split(share, {r: len(n) for r, n in _racks(inventory, spine).items()}):
            placed += _racks(inventory, spine)[rack][:taken]
    return placed


def sorted_by_switch(count: int, inventory: Inventory, draw: random.Random) -> list[str]:
    """DLRover's greedy: whatever nodes came first, then ranks in order of the access switch they hang on."""
    del draw
    came = sorted(inventory.nodes)[:count]
    return sorted(came, key=lambda name: (inventory.nodes[name].place.rack, name))


def topology_blind(count: int, inventory: Inventory, draw: random.Random) -> list[str]:
    """The default scheduler: nodes by name, ranks in the order in which pods came; names say nothing of racks."""
    del draw
    return sorted(inventory.nodes)[:count]


BASELINES: dict[str, Baseline] = {
    "random": at_random,
    "best_fit_by_index": best_fit_by_index,
    "sorted_by_switch": sorted_by_switch,
    "topology_blind": topology_blind,
}


def _spine(inventory: Inventory, node: str) -> str:
    return inventory.nodes[node].place.at("spine")


def _racks(inventory: Inventory, spine: str | None) -> dict[str, list[str]]:
    """Rack -> its free nodes, of one spine or of all."""
    racks: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(inventory.nodes):
        if spine is None or _spine(inventory, name) == spine:
            racks[inventory.nodes[name].place.rack].append(name)
    return dict(racks)


def _split(count: int, room: dict[str, int]) -> list[tuple[str, int]]:
    """The roomiest domains first; the tightest that holds the rest last."""
    left, shares = dict(room), []
    while count:
        holding = [(size, name) for name, size in left.items() if size >= count]
        name = min(holding)[1] if holding else min((-size, name) for name, size in left.items())[1]
        taken = min(count, left.pop(name))
        shares.append((name, taken))
        count -= taken
    return shares
