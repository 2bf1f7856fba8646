"""The scheduler of jobs: their plans, inventories and nodes. The placer behind it handles one request at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial

from meshwright.api.labels import GPU_RESOURCE
from meshwright.api.objects import KubeObject
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cost_model import Calibration, cost_model_for
from meshwright.planner.placement import Placement
from meshwright.planner.plan import Plan
from meshwright.planner.plan_and_place import map_plan_ranks
from meshwright.planner.topology.site import SiteFabric
from meshwright_operator.decide.gang_actions import MapRanks
from meshwright_operator.decide.observed import Observed
from meshwright_operator.decide.placement_outcome import Granted, MappedRanks, NotGranted
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.kube.client import KubeClient
from meshwright_operator.kube.pod_requests import PodRequest, request_json_for
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.scheduling.counted_capacity import gpus_by_node
from meshwright_operator.scheduling.gpu_capacity import GpuCapacity, gpu_capacity
from meshwright_operator.scheduling.inventories import Inventories
from meshwright_operator.scheduling.job_queue import PlacementRequest
from meshwright_operator.scheduling.placer import Later, Placer, Purpose
from meshwright_operator.scheduling.pod_request_lister import PodRequestLister
from meshwright_operator.scheduling.policy import Bounds, Policy
from meshwright_operator.scheduling.preemption import Holder, holder_of
from meshwright_operator.scheduling.reservations import ReservedSpares, reserved_spares
from meshwright_operator.scheduling.waiting_jobs import Surroundings

AVOID_SECONDS = 900.0
"""How long a job avoids a node that did not accept its pod: by then the cause may be gone."""


class JobScheduler:
    """Finds nodes for workers, one job at a time, and queues the jobs that do not fit.

    Nodes that a job was granted count as occupied until its pods are created, so that no two jobs get the same GPUs.
    From then on the pods themselves, gated but pinned to their nodes, occupy them.
    """

    def __init__(
        self,
        cluster: KubeClient,
        cache: Cache,
        metrics: OperatorMetrics,
        namespaces: Sequence[str],
        wake: Callable[[JobKey], None] = lambda key: None,
        inventories: Inventories | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wake` queues the key of a waiting job to be reconciled, because it fits now or its answer is ready."""
        self._cache = cache
        self._clock = clock
        self._inventories = inventories if inventories is not None else Inventories(cache)
        self._wake = wake
        self._calibration = Calibration()
        """The calibrated constants of this cluster's GPUs, which plans use."""
        self._avoided: dict[str, dict[str, tuple[float, str]]] = {}
        self._blocked: dict[str, Mapping[str, str]] = {}
        """uid of a job -> node -> why the job cannot use it now."""
        self._assumed: dict[str, ReservedSpares] = {}
        """uid of a job -> its spare nodes, until its status has them."""
        self._offered: tuple[int, set[str]] = (-1, set())
        """The version of the cache's nodes, and the resources that they have."""
        around = Surroundings(
            inventory=self._prepared_inventory,
            spares=lambda policy: [*reserved_spares(cache, policy), *self._assumed.values()],
            avoided=self._avoided_now,
            exists=self._exists,
            gpu_resources=self._gpu_resources,
            assume=self._assume,
            wake=wake,
            holders=self._holders,
            clock=clock,
        )
        self._lister = PodRequestLister(cluster, cache, namespaces)
        self._placer = Placer(self._lister, metrics, around)
        for pod, request in cache.pod_requests().items():
            self._placer.pod_changed(pod, request)
        cache.set_capacity_listener(self._placer)

    def inventory(self, spec: ParallelTrainingJobSpec) -> Inventory:
        """The job's inventory, as if no pods ran: planning needs no more."""
        return self._inventories.empty(spec)

    async def prepare(self) -> None:
        """Do what would delay the first placement."""
        await self._lister.look()

    async def _prepared_inventory(self, spec: ParallelTrainingJobSpec) -> Inventory:
        """The same, after nodes that changed were read in a thread."""
        await self._inventories.prepare(spec)
        return self.inventory(spec)

    @property
    def calibration(self) -> Calibration:
        """The constants with which jobs are planned and placed."""
        return self._calibration

    def recalibrate(self, calibration: Calibration) -> None:
        """Plans and places with these constants from now on."""
        self._calibration = calibration
        self._placer.recalibrate(calibration)

    def set_policy(self, policy: Policy) -> None:
        """Bounds and orders jobs by this policy from now on, and reconciles all that have not finished."""
        self._placer.set_policy(policy)
        for key in self._cache.jobs:
            self._wake(key)

    def set_fabric(self, site: SiteFabric) -> None:
        """Plans and places jobs on this fabric from now on, and reconciles all that have not finished.

        A job that has started keeps its plan. Its lost workers are placed on the fabric as it is now.
        """
        self._inventories.site = site
        self._placer.may_fit_now()
        for key in self._cache.jobs:
            self._wake(key)

    def bounds(self, namespace: str) -> Bounds:
        """The policy's bounds on the jobs of a namespace."""
        return self._placer.queue.policy.of(namespace)

    def unusable_nodes(self, spec: ParallelTrainingJobSpec, names: Iterable[str]) -> Mapping[str, str]:
        """Those of the nodes that do not accept pods of the job, with the reason."""
        nodes = self.inventory(spec).nodes
        known = (nodes[name] for name in sorted(set(names)) if name in nodes)
        return {node.name: node.unusable for node in known if node.unusable and node.capacity.gpus}

    @asynccontextmanager
    async def grant(self, request: PlacementRequest) -> AsyncIterator[Granted | NotGranted | Later]:
        """Nodes for every worker, reserved until the block ends. A job that gets no nodes is queued.

        Workers in `request.assigned_nodes` keep their nodes. If many jobs ask at once, the answer is `Later`: the job
        is queued, and reconciled again when there is an answer.

        Raises:
            ApiError: Foreign pods could not be listed.
        """
        try:
            yield await self._placer.ask(request, Purpose.PLACE)
        finally:
            self._give_up_assumed(request.uid)

    async def fits_elsewhere(self, request: PlacementRequest) -> bool:
        """Whether the workers that are not in `request.assigned_nodes` fit on other nodes. Does not queue the job.

        Raises:
            ApiError: Foreign pods could not be listed.
        """
        return isinstance(await self._placer.ask(request, Purpose.MOVE), Granted)

    @asynccontextmanager
    async def grow(self, request: PlacementRequest) -> AsyncIterator[Granted | NotGranted]:
        """Nodes for more replicas of a job that trains, reserved until the block ends. Does not queue the job.

        If it gets none, it is woken when they fit.

        Raises:
            ApiError: Foreign pods could not be listed.
        """
        try:
            answer = await self._placer.ask(request, Purpose.GROW)
            assert not isinstance(answer, Later)
            yield answer
        finally:
            self._give_up_assumed(request.uid)

    async def try_edit(self, request: PlacementRequest) -> Plan | NotGranted:
        """The plan with which an edited job can restart, or why it cannot yet. With a plan the job is queued.

        An edit that does not fit is tried again when capacity became free, and the job is woken if it fits then.

        Raises:
            ApiError: Foreign pods could not be listed.
        """
        answer = await self._placer.ask(request, Purpose.EDIT)
        assert not isinstance(answer, Later)
        return answer.placement.plan if isinstance(answer, Granted) else answer

    async def idle(self) -> None:
        """Waits until no request and no waiting job has to be looked at."""
        await self._placer.idle()

    async def map_ranks(self, observed: Observed, step: MapRanks) -> MappedRanks | str:
        """Map ranks onto the nodes that another scheduler chose, or return why that fails. Needs no lock."""
        inventory, plan = self.inventory(observed.placed_spec), observed.plan
        cost_model = cost_model_for(observed.spec, plan.architecture, inventory, self._calibration)
        try:
            assigned = step.assigned_plan_workers
            mapped = await asyncio.to_thread(map_plan_ranks, plan, inventory, cost_model, step.pods, assigned)
        except ValueError as error:
            return str(error)
        return MappedRanks(*mapped)

    def withdraw(self, uid: str) -> None:
        """Removes the job from the queue, because it needs no more nodes."""
        self._placer.withdraw(uid)

    def withdraw_edit(self, uid: str) -> None:
        """Forgets the job's edit that waits to fit."""
        self._placer.withdraw_edit(uid)

    def replica_limit(self, uid: str) -> tuple[int, JobKey] | None:
        """The number of replicas that waiting jobs leave to a job, and the first of these jobs."""
        return self._placer.replica_limit(uid)

    def _holders(self, policy: Policy, now: datetime) -> list[Holder]:
        """The elastic and the preemptible jobs that have workers."""
        found = (
            holder_of(key, job, self._cache.parsed, policy.of(key.namespace).priority.clamp, now)
            for key, job in self._cache.jobs.items()
        )
        return [holder for holder in found if holder is not None]

    def withdraw_growth(self, uid: str) -> None:
        """Forgets that the job waits to grow."""
        self._placer.withdraw_growth(uid)

    def avoid(self, uid: str, nodes: Mapping[str, str], seconds: float | None = None) -> None:
        """Excludes these nodes (name -> reason) for the job with this uid, for `seconds` or `AVOID_SECONDS`."""
        if not nodes:
            return
        until = self._clock() + (AVOID_SECONDS if seconds is None else seconds)
        self._avoided.setdefault(uid, {}).update({name: (until, why) for name, why in nodes.items()})

    def forget_avoided(self, uid: str, reason: str) -> None:
        """Forgets which nodes `avoid` excludes for this reason for the job with this uid."""
        avoided = self._avoided.get(uid, {})
        left = {name: entry for name, entry in avoided.items() if entry[1] != reason}
        if len(left) < len(avoided):
            self._avoided[uid] = left
            self._placer.nodes_changed()

    def set_blocked(self, uid: str, nodes: Mapping[str, str]) -> None:
        """Excludes these nodes (name -> reason), and no others, for the job with this uid until the next call."""
        before = self._blocked.pop(uid, {})
        if nodes:
            self._blocked[uid] = dict(nodes)
        if before.keys() - nodes.keys():
            self._placer.nodes_changed()

    def forget(self, uid: str) -> None:
        """Drops the state of a deleted job."""
        self._placer.withdraw(uid)
        self._placer.withdraw_edit(uid)
        self._placer.withdraw_growth(uid)
        self._avoided.pop(uid, None)
        self._blocked.pop(uid, None)
        self._give_up_assumed(uid)

    def _assume(self, request: PlacementRequest, placement: Placement) -> None:
        """Counts the nodes of workers without pods, and the spare nodes, as occupied."""
        request_json = request_json_for(request.plan.worker_request, request.spec.workers.gpu_resource)
        name, namespace = request.key.name, request.key.namespace
        self._assumed[request.uid] = ReservedSpares.by(request.key, request.uid, placement.spares)
        kept = request.kept_in(placement)
        pods = {
            f"assumed/{request.uid}/{worker}": PodRequest(
                f"{name}-w{worker}", namespace, node, request_json, name, request.uid
            )
            for worker, node in placement.nodes.items()
            if worker not in kept
        }
        self._placer.assume(pods)

    def _give_up_assumed(self, uid: str) -> None:
        """The job's pods exist now, and its status has the spare nodes; or it will be placed again."""
        self._assumed.pop(uid, None)
        self._placer.give_up_assumed(uid)

    def _avoided_now(self, uid: str) -> dict[str, str]:
        """Node -> why this job avoids it now."""
        blocked = self._blocked.get(uid, {})
        if uid not in self._avoided:
            return dict(blocked)
        now = self._clock()
        current = {name: entry for name, entry in self._avoided[uid].items() if entry[0] > now}
        self._avoided[uid] = current
        return {name: why for name, (_, why) in current.items()} | dict(blocked)

    def _exists(self, request: PlacementRequest) -> bool:
        """Whether the job still exists and is not suspended."""
        job = self._cache.jobs.get(request.key)
        if job is None or job["metadata"].get("uid") != request.uid or job["metadata"].get("deletionTimestamp"):
            return False
        spec = job.get("spec")
        return not (isinstance(spec, Mapping) and spec.get("suspend") is True)

    async def gpu_capacities(self) -> dict[str, GpuCapacity]:
        """The GPUs of every GPU resource that nodes have and jobs request. Foreign pods are those last listed.

        In a large cluster, nodes and pods are counted in a thread.
        """
        resources = {*self._gpu_resources(), *({GPU_RESOURCE} & self._offered_resources())}
        found = {}
        for resource in sorted(resources):
            await self._inventories.prepare_all_nodes(resource)
            count = partial(
                _count_gpus, self._inventories.of_all_nodes(resource), self._placer.pod_requests(), resource
            )
            found[resource] = await asyncio.to_thread(count) if self._inventories.need_preparation else count()
        return found

    def _offered_resources(self) -> set[str]:
        """The resources that nodes have."""
        version, offered = self._offered
        if version != self._cache.nodes_version:
            offered = {name for node in self._cache.nodes.values() for name in _allocatable(node)}
            self._offered = self._cache.nodes_version, offered
        return offered

    def _gpu_resources(self) -> Iterable[str]:
        """The GPU resources of nodes that jobs request, so that all of them count as used by their namespaces."""
        offered = self._offered_resources()
        for job in self._cache.jobs.values():
            spec = job.get("spec")
            workers = spec.get("workers") if isinstance(spec, Mapping) else None
            resource = workers.get("gpuResource") if isinstance(workers, Mapping) else None
            resource = resource if isinstance(resource, str) else GPU_RESOURCE
            if resource in offered:
                yield resource


def _count_gpus(inventory: Inventory, requests: Mapping[str, PodRequest | None], resource: str) -> GpuCapacity:
    return gpu_capacity(inventory, gpus_by_node(requests.values(), resource))


def _allocatable(node: KubeObject) -> Mapping[str, object]:
    resources = node["status"]["allocatable"]
    return resources if isinstance(resources, Mapping) else {}
