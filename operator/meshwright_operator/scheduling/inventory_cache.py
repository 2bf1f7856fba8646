"""The nodes as jobs see them, read once for all jobs that want the same of nodes, until a node changes."""

from __future__ import annotations

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.cluster.inventory import Inventory
from meshwright_operator.kube.cache import Cache

MAX_ENTRIES = 64
"""Different wishes that are remembered at the same time."""

NodeRequirements = tuple[str, tuple[tuple[str, str], ...], tuple[str, ...]]


class InventoryCache:
    """Inventories of the cache's nodes with nothing on them."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._version = -1
        self._known: dict[NodeRequirements, Inventory] = {}

    def empty(self, spec: ParallelTrainingJobSpec) -> Inventory:
        """The nodes as a job of this spec sees them, as if nothing ran on them."""
        version = self._cache.nodes_version
        if version != self._version or len(self._known) > MAX_ENTRIES:
            self._known, self._version = {}, version
        requirements = node_requirements(spec)
        found = self._known.get(requirements)
        if found is None:
            workers = spec.workers
            found = Inventory.from_objects(
                list(self._cache.nodes.values()),
                (),
                gpu_resource=workers.gpu_resource,
                node_selector=workers.node_selector,
                tolerations=workers.tolerations,
            )
            self._known[requirements] = found
        return found


def node_requirements(spec: ParallelTrainingJobSpec) -> NodeRequirements:
    """All that a spec says of nodes: jobs of the same wishes see the same inventory."""
    workers = spec.workers
    tolerations = tuple(toleration.model_dump_json() for toleration in workers.tolerations)
    return workers.gpu_resource, tuple(sorted(workers.node_selector.items())), tolerations
