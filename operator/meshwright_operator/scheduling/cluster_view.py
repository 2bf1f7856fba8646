"""What pods request and what is free, updated by changes and reused by every placement.

The view is used by one placement at a time, in a thread. The event loop only collects the changes that it gets next.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from meshwright.planner.cluster.inventory import MALFORMED, Inventory, Node
from meshwright.planner.cluster.pod_resources import Resources
from meshwright.planner.placement.fit_error import fits
from meshwright.planner.plan import Plan
from meshwright_operator.kube.pod_requests import PodRequest
from meshwright_operator.scheduling.free_blocks import BlockShape, FreeBlocks

MAX_FREE_NODES = 32
"""Different inventories whose free nodes are kept."""
MAX_SHAPES = 32
"""Different shapes of blocks that are counted on each of them."""

NOTHING = Resources()


Key = TypeVar("Key", bound=Hashable)


class ResourceUse:
    """What pods use, with the GPUs of one extended resource."""

    def __init__(self, gpu_resource: str) -> None:
        self.gpu_resource = gpu_resource
        self.by_node: dict[str, Resources] = {}
        self.jobs_by_node: dict[str, Resources] = {}
        """The same without foreign pods."""
        self.malformed: dict[str, str] = {}
        """Pod id -> why it could not be counted."""
        self.gpus_by_namespace: Counter[str] = Counter()
        """GPUs of jobs' pods."""
        self.gpus_by_occupant: Counter[tuple[str, str]] = Counter()
        """(name, uid of the job) -> its GPUs."""

    def count(self, pod_id: str, request: PodRequest, sign: int) -> None:
        """Adds (1) or subtracts (-1) what a pod requests."""
        try:
            amount = request.amount(self.gpu_resource) * sign
        except MALFORMED as error:
            self.malformed[pod_id] = f"pod {request.name} was not counted: its object is malformed ({error})"
            if sign < 0:
                del self.malformed[pod_id]
            return
        _add(self.by_node, request.node, amount)
        if request.job_uid:
            _add(self.jobs_by_node, request.node, amount)
        if amount.gpus:
            if request.job_uid:
                _count(self.gpus_by_namespace, request.namespace, amount.gpus)
            _count(self.gpus_by_occupant, occupant_of(request), amount.gpus)


class FreeNodes:
    """The nodes of one inventory with what is free on them now."""

    def __init__(self, empty: Inventory, use: ResourceUse) -> None:
        self.empty = empty
        self.use = use
        self.nodes: dict[str, Node] = dict(empty.nodes)
        self._blocks: OrderedDict[BlockShape, FreeBlocks] = OrderedDict()
        self.refresh(use.by_node)

    def rebase(self, empty: Inventory) -> None:
        """Takes over a newer inventory: only the nodes that differ are counted again."""
        old, self.empty = self.empty.nodes, empty
        for name in old.keys() - empty.nodes.keys():
            del self.nodes[name]
            for blocks in self._blocks.values():
                blocks.remove(name)
        self.refresh([name for name, node in empty.nodes.items() if old.get(name) is not node])

    def refresh(self, names: Iterable[str]) -> None:
        """Reads again what is used on these nodes."""
        for name in names:
            node = self.empty.nodes.get(name)
            if node is None:
                continue
            node = replace(node, free=node.capacity - self.use.by_node.get(name, NOTHING))
            if self.nodes.get(name) == node:
                continue
            self.nodes[name] = node
            for blocks in self._blocks.values():
                blocks.update(node)

    def has_capacity(self, plan: Plan, changed: Mapping[str, Node]) -> bool:
        """Whether all of the plan's workers fit, if these nodes replaced those with the same names."""
        shape = BlockShape.of(plan)
        blocks = self._blocks.get(shape)
        if blocks is None:
            blocks = self._blocks[shape] = FreeBlocks(plan, self.nodes)
            if len(self._blocks) > MAX_SHAPES:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(shape)
        needed = plan.layout.world_size // plan.gpus_per_worker // shape.block_workers
        if blocks.total_with(changed) < needed:
            return False
        return plan.topology is None or fits(plan, self.inventory(changed))

    def inventory(self, changed: Mapping[str, Node]) -> Inventory:
        """The inventory, with these nodes instead of those with the same names."""
        nodes = replace(self.empty, nodes={**self.nodes, **changed})
        return nodes.holding({}, tuple(self.use.malformed.values()))

    def excluding(self, taken: Mapping[str, str], changed: Mapping[str, Node]) -> dict[str, Node]:
        """`changed`, and the nodes in `taken` (name -> reason) marked as unusable."""
        result = dict(changed)
        for name, why in taken.items():
            node = result.get(name) or self.nodes.get(name)
            if node is not None and not node.unusable:
                result[name] = replace(node, unusable=why)
        return result

    def without(self, amounts: Mapping[str, Resources]) -> dict[str, Node]:
        """The nodes on which something would be free if these amounts (by node) were not used."""
        return {
            name: replace(self.nodes[name], free=self.nodes[name].free + amount)
            for name, amount in amounts.items()
            if name in self.nodes
        }


class ClusterView:
    """The requests of all pods, by node and by job, and what they leave free."""

    def __init__(self) -> None:
        self._requests: dict[str, PodRequest] = {}
        self._by_occupant: defaultdict[tuple[str, str], dict[str, PodRequest]] = defaultdict(dict)
        self._by_job: defaultdict[tuple[str, str], dict[str, PodRequest]] = defaultdict(dict)
        """(namespace, uid) of a job -> its pods. A pod of another namespace may claim the uid."""
        self._foreign: set[str] = set()
        self._uses: dict[str, ResourceUse] = {}
        self._free: OrderedDict[Hashable, FreeNodes] = OrderedDict()

    def apply(self, changes: Mapping[str, PodRequest | None]) -> bool:
        """Replaces the requests of pods (by id; None: it requests nothing). Returns whether something became free."""
        dirty: set[str] = set()
        freed = False
        for pod_id, new in changes.items():
            old = self._requests.get(pod_id)
            if old == new:
                continue
            if old is not None:
                freed = True
                self._remove(pod_id, old)
                dirty.add(old.node)
            if new is not None:
                self._add(pod_id, new)
                dirty.add(new.node)
        if dirty:
            for free in self._free.values():
                free.refresh(dirty)
        return freed

    def replace_foreign(self, requests: Iterable[PodRequest]) -> bool:
        """Replaces the requests of all foreign pods. Returns whether something became free."""
        listed = {f"foreign/{request.namespace}/{request.name}": request for request in requests}
        gone: dict[str, PodRequest | None] = dict.fromkeys(self._foreign - listed.keys())
        self._foreign = set(listed)
        return self.apply({**gone, **listed})

    def requests(self) -> dict[str, PodRequest]:
        """A copy of the requests of all counted pods, by id."""
        return dict(self._requests)

    def has_pod(self, pod_id: str) -> bool:
        """Whether the requests of this pod are counted."""
        return pod_id in self._requests

    def resources(self) -> list[str]:
        """The GPU resources whose use is counted."""
        return list(self._uses)

    def forget_unused(self, gpu_resource: str) -> None:
        """Stops to count the use of a GPU resource, unless pods use it."""
        if self._uses[gpu_resource].gpus_by_occupant:
            return
        del self._uses[gpu_resource]
        # What is free was read from the use that is not updated any more.
        for requirements in [key for key, free in self._free.items() if free.use.gpu_resource == gpu_resource]:
            del self._free[requirements]

    def knows(self, gpu_resource: str) -> bool:
        """Whether the use of this GPU resource is counted already."""
        return gpu_resource in self._uses

    def use_of(self, gpu_resource: str) -> ResourceUse:
        """What is used of this GPU resource, and of CPU and memory."""
        use = self._uses.get(gpu_resource)
        if use is None:
            use = self._uses[gpu_resource] = ResourceUse(gpu_resource)
            for pod_id, request in self._requests.items():
                use.count(pod_id, request, 1)
        return use

    def free_nodes(self, requirements: Hashable, empty: Inventory, gpu_resource: str) -> FreeNodes:
        """The free nodes of jobs with the same requirements on nodes, whose inventory without pods is `empty`."""
        free = self._free.get(requirements)
        if free is None:
            free = self._free[requirements] = FreeNodes(empty, self.use_of(gpu_resource))
            if len(self._free) > MAX_FREE_NODES:
                self._free.popitem(last=False)
        elif free.empty is not empty:
            free.rebase(empty)
        self._free.move_to_end(requirements)
        return free

    def used_by_job(self, namespace: str, uid: str, gpu_resource: str) -> dict[str, Resources]:
        """Node -> what the pods of a job request there."""
        return _by_node(self._by_job.get((namespace, uid), {}).values(), gpu_resource)

    def used_by_occupant(self, occupant: tuple[str, str], gpu_resource: str) -> dict[str, Resources]:
        """Node -> what a job, or a foreign pod, requests there."""
        return _by_node(self._by_occupant.get(occupant, {}).values(), gpu_resource)

    def gpus_in_use(self, namespace: str, without_job: str = "") -> int:
        """GPUs of the pods of the namespace's jobs, except one job."""
        total = sum(use.gpus_by_namespace[namespace] for use in self._uses.values())
        if not without_job:
            return total
        own = self._by_job.get((namespace, without_job), {}).values()
        return total - sum(amount.gpus for resource in self._uses for amount in _by_node(own, resource).values())

    def _add(self, pod_id: str, request: PodRequest) -> None:
        self._requests[pod_id] = request
        self._by_occupant[occupant_of(request)][pod_id] = request
        if request.job_uid:
            self._by_job[request.namespace, request.job_uid][pod_id] = request
        for use in self._uses.values():
            use.count(pod_id, request, 1)

    def _remove(self, pod_id: str, request: PodRequest) -> None:
        del self._requests[pod_id]
        _discard(self._by_occupant, occupant_of(request), pod_id)
        if request.job_uid:
            _discard(self._by_job, (request.namespace, request.job_uid), pod_id)
        for use in self._uses.values():
            use.count(pod_id, request, -1)


def occupant_of(request: PodRequest) -> tuple[str, str]:
    """The job or foreign pod that a request counts for: its name in messages, and the uid of the job."""
    if request.job_uid:
        return f"job {request.namespace}/{request.job}", request.job_uid
    return f"pod {request.namespace}/{request.name}", ""


def _by_node(requests: Iterable[PodRequest], gpu_resource: str) -> dict[str, Resources]:
    amounts: dict[str, Resources] = {}
    for request in requests:
        try:
            _add(amounts, request.node, request.amount(gpu_resource))
        except MALFORMED:
            continue
    return amounts


def _add(amounts: dict[str, Resources], node: str, amount: Resources) -> None:
    total = amounts.get(node, NOTHING) + amount
    if total == NOTHING:
        amounts.pop(node, None)
    else:
        amounts[node] = total


def _count(counter: Counter[Key], key: Key, gpus: int) -> None:
    counter[key] += gpus
    if not counter[key]:
        del counter[key]


def _discard(index: dict[Key, dict[str, PodRequest]], key: Key, pod_id: str) -> None:
    entries = index[key]
    entries.pop(pod_id, None)
    if not entries:
        del index[key]
