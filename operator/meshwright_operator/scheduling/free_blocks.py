"""Counts how many blocks of workers fit, and updates the count when single nodes change.

`FreeCapacity` in the planner counts over all nodes. A queue of waiting jobs asks again after every pod that ends, so
here a count over 12,500 nodes is kept, and each change of a node updates it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from meshwright.planner.cluster.inventory import Node
from meshwright.planner.cluster.pod_resources import Resources
from meshwright.planner.placement.capacity import GangShape, name_at, why_too_small
from meshwright.planner.placement.group_levels import base_level
from meshwright.planner.plan import Plan


class BlockShape(NamedTuple):
    """What a block of workers needs. Plans with the same shape have the same count."""

    request: Resources
    block_workers: int
    rank_memory: float | None
    level: str
    """The level that a block must not leave."""

    @classmethod
    def of(cls, plan: Plan) -> BlockShape:
        """The shape of a plan's blocks."""
        memory = plan.memory.total if plan.memory is not None else None
        return cls(plan.worker_request, GangShape(plan).block_workers, memory, base_level(plan))


class FreeBlocks:
    """The number of complete blocks of one shape that fit on some nodes."""

    def __init__(self, plan: Plan, nodes: Mapping[str, Node]) -> None:
        self._plan = plan
        self._block_workers = GangShape(plan).block_workers
        self._level = base_level(plan)
        self._places: dict[str, tuple[str, int]] = {}
        """Node -> its location at the level that a block must not leave, and how many workers fit on it."""
        self._by_domain: defaultdict[str, int] = defaultdict(int)
        self.total = 0
        """Number of complete blocks that fit in all domains together."""
        for node in nodes.values():
            self.update(node)

    def update(self, node: Node) -> None:
        """Counts a node again."""
        domain, before = self._places.get(node.name, (name_at(node, self._level), 0))
        if domain != name_at(node, self._level):
            self._add(domain, -before)
            domain, before = name_at(node, self._level), 0
        workers = self._workers_on(node)
        self._places[node.name] = domain, workers
        self._add(domain, workers - before)

    def remove(self, name: str) -> None:
        """Forgets a node that is gone."""
        domain, workers = self._places.pop(name, ("", 0))
        self._add(domain, -workers)

    def __len__(self) -> int:
        """The number of nodes."""
        return len(self._places)

    def total_with(self, changed: Mapping[str, Node]) -> int:
        """The number of blocks if these nodes replaced the nodes with the same names."""
        difference: defaultdict[str, int] = defaultdict(int)
        for name, node in changed.items():
            domain, before = self._places.get(name, (name_at(node, self._level), 0))
            difference[domain] += self._workers_on(node) - before
        return self.total + sum(
            (self._by_domain[domain] + workers) // self._block_workers - self._by_domain[domain] // self._block_workers
            for domain, workers in difference.items()
        )

    def _workers_on(self, node: Node) -> int:
        if node.unusable:
            return 0
        workers = node.free.fits(self._plan.worker_request)
        return workers if workers and not why_too_small(self._plan, node) else 0

    def _add(self, domain: str, workers: int) -> None:
        if workers:
            before = self._by_domain[domain]
            self._by_domain[domain] = before + workers
            self.total += (before + workers) // self._block_workers - before // self._block_workers
