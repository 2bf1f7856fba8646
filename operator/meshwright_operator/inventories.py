"""The nodes as jobs see them, read once for all jobs that want the same of nodes, until a node changes."""

from __future__ import annotations

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.inventory import Inventory
from meshwright_operator.cache import Cache

KEPT = 64
"""Different wishes that are remembered at the same time."""

Wishes = tuple[str, tuple[tuple[str, str], ...], tuple[str, ...]]


class Inventories:
    """Inventories of the cache's nodes with nothing on them."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._version = -1
        self._known: dict[Wishes, Inventory] = {}

    def empty(self, spec: ParallelTrainingJobSpec) -> Inventory:
        """The nodes as a job of this spec sees them, as if nothing ran on them."""
        version = self._cache.nodes_version
        if version != self._version or len(self._known) > KEPT:
            self._known, self._version = {}, version
        wishes = wishes_of(spec)
        found = self._known.get(wishes)
        if found is None:
            workers = spec.workers
            found = Inventory.from_objects(
                list(self._cache.nodes.values()),
                (),
                gpu_resource=workers.gpu_resource,
                node_selector=workers.node_selector,
                tolerations=workers.tolerations,
            )
            self._known[wishes] = found
        return found


def wishes_of(spec: ParallelTrainingJobSpec) -> Wishes:
    """All that a spec says of nodes: jobs of the same wishes see the same inventory."""
    workers = spec.workers
    tolerations = tuple(toleration.model_dump_json() for toleration in workers.tolerations)
    return workers.gpu_resource, tuple(sorted(workers.node_selector.items())), tolerations
