"""Inventories of the cache's nodes without pods, one for all jobs with the same node requirements.

A node's object is read once, whatever the number of requirements, and again only if it changes. Inventories with
different requirements share their nodes. `prepare` does in a thread what takes long for thousands of nodes, so that
the event loop is not blocked: await it before `empty` or `hardware`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from meshwright.api.objects import KubeObject
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.workers import Toleration
from meshwright.planner.cluster.inventory import Inventory, Node, missing_label_warnings
from meshwright.planner.hardware import Hardware
from meshwright.planner.topology import Location
from meshwright.planner.topology.site import DEFAULT_SITE, SiteFabric
from meshwright_operator.kube.cache import Cache
from meshwright_operator.scheduling.node_set import NodeSet

MAX_INVENTORIES = 32
"""Different node requirements for which an inventory is cached. The least recently used one is dropped."""
MAX_NODE_SETS = 4
"""Different GPU resources for which nodes are stored in the form that inventories are made from."""
INLINE_NODES = 256
"""A cluster of this size takes so little time that no thread is needed."""


@dataclass(frozen=True, slots=True)
class NodeRequirements:
    """All requirements of a spec on nodes. Jobs with the same requirements have the same inventory."""

    gpu_resource: str
    selector: tuple[tuple[str, str], ...]
    tolerations: tuple[str, ...]
    channel: bool = True
    """Whether pods have an IMEX channel, so that NVLink joins the nodes of a clique."""
    pods_joined: bool = True
    """Whether a claim joins the pods of one host."""

    @classmethod
    def of(cls, spec: ParallelTrainingJobSpec) -> NodeRequirements:
        """Return the requirements of a spec."""
        workers = spec.workers
        tolerations = tuple(toleration.model_dump_json() for toleration in workers.tolerations)
        selector = tuple(sorted(workers.node_selector.items()))
        return cls(workers.gpu_resource, selector, tolerations, spec.has_channel, spec.joins_pods)


class Inventories:
    """The inventory of every job, as if no pods ran."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._sets: OrderedDict[tuple[str, bool], NodeSet] = OrderedDict()
        self._views: OrderedDict[NodeRequirements, _View] = OrderedDict()
        self._pool: dict[Node, Node] = {}
        self.site: SiteFabric = DEFAULT_SITE
        """The fabric of the site. With another one, all nodes are read again."""
        self._lock = asyncio.Lock()
        self._in_thread = False
        self._owner = threading.get_ident()
        """The thread of the event loop. Others, such as that of the calibration, only read."""

    @property
    def need_preparation(self) -> bool:
        """Whether the cluster is so large that `prepare` must be awaited."""
        return len(self._cache.nodes) > INLINE_NODES

    async def prepare(self, spec: ParallelTrainingJobSpec) -> None:
        """Bring the inventory and the hardware of a spec up to date, in a thread if that takes long."""
        await self._prepare(NodeRequirements.of(spec), spec.workers.gpus_per_worker)

    async def prepare_all_nodes(self, gpu_resource: str) -> None:
        """Bring the inventory of all nodes up to date, in a thread if that takes long."""
        await self._prepare(_all_nodes(gpu_resource), None)

    async def _prepare(self, requirements: NodeRequirements, gpus: int | None) -> None:
        if self._is_current(requirements, gpus):
            return
        async with self._lock:
            if self._is_current(requirements, gpus):
                return
            nodes, version = dict(self._cache.nodes), self._cache.nodes_version
            self._in_thread = True
            updating = asyncio.ensure_future(asyncio.to_thread(self._update, requirements, gpus, nodes, version))
            try:
                await asyncio.shield(updating)
            except asyncio.CancelledError:
                # The thread cannot be cancelled, and nobody else may change what it changes.
                await asyncio.wait([updating])
                raise
            finally:
                self._in_thread = False

    def empty(self, spec: ParallelTrainingJobSpec) -> Inventory:
        """The inventory of a job with this spec, as if no pods ran."""
        return self._view(spec).inventory

    def of_all_nodes(self, gpu_resource: str) -> Inventory:
        """The inventory of a job that accepts all nodes and tolerates every taint, as if no pods ran."""
        return self._view_of(_all_nodes(gpu_resource)).inventory

    def hardware(self, spec: ParallelTrainingJobSpec) -> Hardware:
        """The hardware that a job with this spec is planned for."""
        return self._view(spec).hardware(spec.workers.gpus_per_worker)

    def _view(self, spec: ParallelTrainingJobSpec) -> _View:
        return self._view_of(NodeRequirements.of(spec))

    def _view_of(self, requirements: NodeRequirements) -> _View:
        nodes = self._cache.nodes
        view, version = self._views.get(requirements), self._cache.nodes_version
        if self._in_thread or threading.get_ident() != self._owner:
            # The last inventory is current enough. Without one, what another thread changes must not be used.
            return view or self._unshared(requirements, dict(nodes))
        if view is None or view.version != version or view.inventory.site is not self.site:
            return self._update(requirements, None, nodes, version)
        self._views.move_to_end(requirements)
        return view

    def _is_current(self, requirements: NodeRequirements, gpus: int | None) -> bool:
        """Whether nothing is left to do that takes long."""
        if not self.need_preparation:
            return True
        view = self._views.get(requirements)
        return (
            view is not None
            and view.version == self._cache.nodes_version
            and view.inventory.site is self.site
            and (gpus is None or gpus in view.hardware_by_size)
        )

    def _update(
        self, requirements: NodeRequirements, gpus: int | None, nodes: Mapping[str, KubeObject], version: int
    ) -> _View:
        """Bring a view up to date. Runs in the event loop or in a thread, but never in both at once."""
        resource = requirements.gpu_resource, requirements.channel
        nodes_of_resource = self._sets.get(resource)
        site = self.site
        if nodes_of_resource is None or nodes_of_resource.site is not site:
            nodes_of_resource = self._sets[resource] = NodeSet(resource[0], self._interned, site, channel=resource[1])
        self._sets.move_to_end(resource)
        try:
            nodes_of_resource.update(nodes, version)
        except Exception:
            del self._sets[resource]  # Only a part of the nodes was read.
            raise
        view = (self._views.get(requirements) or _View(requirements)).updated(nodes_of_resource)
        if gpus is not None:
            view.hardware(gpus)
        self._views[requirements] = view
        self._views.move_to_end(requirements)
        self._drop_unused(len(nodes))
        return view

    def _interned(self, node: Node) -> Node:
        return self._pool.setdefault(node, node)

    def _drop_unused(self, nodes: int) -> None:
        while len(self._views) > MAX_INVENTORIES:
            self._views.popitem(last=False)
        while len(self._sets) > MAX_NODE_SETS:
            self._sets.popitem(last=False)
        if len(self._pool) > 8 * nodes + 1024:
            # It has nodes of earlier versions too. From now on, only what is added is shared.
            self._pool.clear()

    def _unshared(self, requirements: NodeRequirements, nodes: Mapping[str, KubeObject]) -> _View:
        channel = requirements.channel
        nodes_of_resource = NodeSet(requirements.gpu_resource, lambda node: node, self.site, channel=channel)
        nodes_of_resource.update(nodes, 0)
        return _View(requirements).updated(nodes_of_resource)


@dataclass(frozen=True, slots=True)
class _View:
    """The nodes as jobs with the same requirements see them, in one version. Others may read it: never changed."""

    requirements: NodeRequirements
    version: int = -1
    inventory: Inventory = Inventory()
    usable: Counter[Location] = field(default_factory=Counter)
    """Number of usable nodes by location."""
    hardware_by_size: dict[int, Hardware] = field(default_factory=dict)
    """GPUs per worker -> hardware."""

    def hardware(self, gpus_per_worker: int) -> Hardware:
        """The hardware for workers of this size."""
        found = self.hardware_by_size.get(gpus_per_worker)
        if found is None:
            found = self.hardware_by_size[gpus_per_worker] = Hardware.of(self.inventory, gpus_per_worker)
        return found

    def updated(self, shared: NodeSet) -> _View:
        """The view of the nodes as they are now."""
        if self.version >= 0 and self.inventory.site is not shared.site:
            return _View(self.requirements).updated(shared)
        if self.version == shared.version:
            return self
        if self.version < shared.changes_since and self.version >= 0:
            return _View(self.requirements).updated(shared)
        nodes, usable = dict(self.inventory.nodes), Counter(self.usable)
        planned_with_others = False
        for name, node in self._read_again(shared):
            old = nodes.pop(name, None) if node is None else nodes.get(name)
            if old is not None and not old.unusable:
                usable[old.place] -= 1
            if node is not None:
                nodes[name] = node
                usable[node.place] += not node.unusable
            planned_with_others = planned_with_others or _hardware_of(old) != _hardware_of(node)
        counted = Counter({place: count for place, count in usable.items() if count})
        warnings = (
            *shared.warnings.values(),
            *shared.conflicts,
            *missing_label_warnings(counted, shared.levels),
        )
        return _View(
            self.requirements,
            shared.version,
            Inventory(nodes, warnings, shared.levels, shared.site, self.requirements.pods_joined),
            counted,
            # Without a usable node, hardware says why the others are excluded.
            {} if planned_with_others or not counted else dict(self.hardware_by_size),
        )

    def _read_again(self, shared: NodeSet) -> Iterable[tuple[str, Node | None]]:
        """Nodes that have changed since this view; None if a node is gone."""
        selector = dict(self.requirements.selector)
        tolerations = [Toleration.model_validate_json(text) for text in self.requirements.tolerations]
        changed = [name for name, version in shared.changed_in.items() if version > self.version]
        for name in shared.names() if self.version < 0 else changed:
            yield name, shared.node(name, selector, tolerations)


def _all_nodes(gpu_resource: str) -> NodeRequirements:
    """The requirements of a job that accepts all nodes and tolerates every taint."""
    return NodeRequirements(gpu_resource, (), (Toleration(operator="Exists").model_dump_json(),))


def _hardware_of(node: Node | None) -> object:
    """What planning reads of a node."""
    if node is None or node.unusable:
        return None
    return node.capacity.gpus, node.gpu_product, node.gpu_memory_bytes, node.place, node.separate_host
