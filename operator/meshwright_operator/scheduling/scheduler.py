"""The scheduler places one job at a time, under one lock: with the queue, the requests of all pods, and the planner."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cost_model import Calibration, cost_model_for
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.placement import Placement, with_spares
from meshwright.planner.plan import Plan
from meshwright.planner.plan_and_place import map_plan_ranks
from meshwright_operator.decide.gang_actions import MapRanks
from meshwright_operator.decide.observed import Observed
from meshwright_operator.decide.placement_outcome import Granted, MappedRanks, NotGranted
from meshwright_operator.kube.cache import Cache
from meshwright_operator.kube.client import KubeClient
from meshwright_operator.kube.pod_requests import PodRequest, request_json_for, requested_by_node
from meshwright_operator.metrics.operator_metrics import OperatorMetrics
from meshwright_operator.scheduling.capacity_hint import capacity_hint, occupants
from meshwright_operator.scheduling.inventories import Inventories, NodeRequirements
from meshwright_operator.scheduling.job_queue import (
    JobQueue,
    PlacementRequest,
    ReservedSpares,
    claims_ahead,
    excluding,
    has_capacity,
    nodes_for,
    placement_for,
    reserved_for_others,
    reserved_spares,
)
from meshwright_operator.scheduling.pod_request_lister import PodRequestLister
from meshwright_operator.text import counted, sentences

WAKE_COUNT = 4
"""How many jobs at the head of the queue are reconciled after a job got nodes. The others wait behind them."""
AVOID_SECONDS = 900.0
"""How long a job avoids a node that did not accept its pod: by then the cause may be gone."""


class _QueuedError(Exception):
    """The job fits, but a job ahead of it in the queue fits too and gets the nodes."""

    def __init__(self, ahead: PlacementRequest) -> None:
        super().__init__(f"The job fits, but job {ahead.key} is ahead of it in the queue and fits too")
        self.ahead = ahead.key


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
        inventories: Inventories | None = None,
    ) -> None:
        self._cache = cache
        self._pod_request_lister = PodRequestLister(cluster, cache, namespaces)
        self._inventories = inventories if inventories is not None else Inventories(cache)
        self._metrics = metrics
        self._lock = asyncio.Lock()
        """Held while a job is placed."""
        self._queue = JobQueue()
        self._calibration = Calibration()
        """The calibrated constants of this cluster's GPUs, which plans use."""
        self._avoided: dict[str, dict[str, tuple[float, str]]] = {}
        self._assumed: dict[str, list[PodRequest]] = {}
        self._assumed_spares: dict[str, ReservedSpares] = {}

    def inventory(self, spec: ParallelTrainingJobSpec) -> Inventory:
        """The job's inventory, as if no pods ran: planning needs no more."""
        return self._inventories.empty(spec)

    @property
    def calibration(self) -> Calibration:
        """The constants with which jobs are planned and placed."""
        return self._calibration

    def recalibrate(self, calibration: Calibration) -> None:
        """Plans and places with these constants from now on."""
        self._calibration = calibration

    def unusable_nodes(self, spec: ParallelTrainingJobSpec, names: Iterable[str]) -> Mapping[str, str]:
        """Those of the nodes that do not accept pods of the job, with the reason."""
        nodes = self.inventory(spec).nodes
        known = (nodes[name] for name in sorted(set(names)) if name in nodes)
        return {node.name: node.unusable for node in known if node.unusable and node.capacity.gpus}

    @asynccontextmanager
    async def grant(self, request: PlacementRequest) -> AsyncIterator[Granted | NotGranted]:
        """Nodes for every worker, reserved until the block ends. A job that gets no nodes is queued.

        Workers in `request.assigned_nodes` keep their nodes. The lock is released as soon as the answer is known.

        Raises:
            ApiError: Foreign pods could not be listed.
        """
        async with self._lock:
            grant = await self._place(request)
            if isinstance(grant, Granted):
                self._queue.remove(request.uid)
                self._assume(request, grant.placement)
                grant = replace(grant, wake=tuple(self._queue.head(WAKE_COUNT)))
            else:
                self._queue.add(request)
        try:
            yield grant
        finally:
            self._release_assumed(request.uid)

    async def fits_elsewhere(self, request: PlacementRequest) -> bool:
        """Whether the workers that are not in `request.assigned_nodes` fit on other nodes. Does not queue the job.

        Raises:
            ApiError: Foreign pods could not be listed.
        """
        async with self._lock:
            return isinstance(await self._place(request), Granted)

    async def try_edit(self, request: PlacementRequest) -> Plan | str:
        """The plan with which an edited job can restart, or a message why it cannot yet. With a plan the job is queued.

        Raises:
            ApiError: Foreign pods could not be listed.
        """
        async with self._lock:
            grant = await self._place(request)
            if isinstance(grant, NotGranted):
                if grant.waits_for_turn:
                    return sentences("The edit waits for its turn", grant.message)
                return f"The edit does not fit: {grant.message}"
            self._queue.add(replace(request, plan=grant.placement.plan, other_plans=()))
            return grant.placement.plan

    async def map_ranks(self, observed: Observed, step: MapRanks) -> MappedRanks | str:
        """Map ranks onto the nodes that another scheduler chose, or return why that fails. Needs no lock."""
        inventory, plan = self.inventory(observed.spec), observed.plan
        cost_model = cost_model_for(observed.spec, plan.architecture, inventory, self._calibration)
        try:
            assigned = step.assigned_plan_workers
            mapped = await asyncio.to_thread(map_plan_ranks, plan, inventory, cost_model, step.pods, assigned)
        except ValueError as error:
            return str(error)
        return MappedRanks(*mapped)

    def withdraw(self, uid: str) -> None:
        """Removes the job from the queue, because it needs no more nodes."""
        self._queue.remove(uid)

    def avoid(self, uid: str, nodes: Mapping[str, str]) -> None:
        """Excludes these nodes (name -> reason) for the job with this uid, for `AVOID_SECONDS`."""
        if not nodes:
            return
        until = time.monotonic() + AVOID_SECONDS
        self._avoided.setdefault(uid, {}).update({name: (until, why) for name, why in nodes.items()})

    def forget(self, uid: str) -> None:
        """Drops the state of a deleted job."""
        self._queue.remove(uid)
        self._avoided.pop(uid, None)
        self._release_assumed(uid)

    async def _place(self, request: PlacementRequest) -> Granted | NotGranted:
        """Places one job. The caller has the lock."""
        started = time.monotonic()
        result = "error"
        try:
            snapshot = await self._snapshot(request)
            result = "does_not_fit"
            placement = await asyncio.to_thread(snapshot.place, request)
            result = "placed"
            self._metrics.placement_cost.observe(placement.cost)
            return Granted(placement, snapshot.warnings)
        except DoesNotFitError as error:
            return NotGranted(str(error), snapshot.warnings, blocked_by_kept_workers=error.blocked_by_kept_workers)
        except _QueuedError as error:
            return NotGranted(str(error), waits_for_turn=True, wake=(error.ahead,))
        finally:
            self._metrics.placement_attempts.labels(result).inc()
            self._metrics.placement_seconds.observe(time.monotonic() - started)

    async def _snapshot(self, request: PlacementRequest) -> _Snapshot:
        pod_requests = await self._pod_request_lister.pod_requests()
        pod_requests += [pod_request for assumed in self._assumed.values() for pod_request in assumed]
        ahead = self._queue.ahead_of(request)
        for queued in (request, *ahead):
            await self._inventories.prepare(queued.spec)
        return _Snapshot(
            ahead=ahead,
            avoided={queued.uid: self._avoided_now(queued.uid) for queued in (request, *ahead)},
            empty={queued.uid: self.inventory(queued.spec) for queued in (request, *ahead)},
            pod_requests=pod_requests,
            spares=[*reserved_spares(self._cache), *self._assumed_spares.values()],
            calibration=self._calibration,
        )

    def _assume(self, request: PlacementRequest, placement: Placement) -> None:
        """Counts the nodes of workers without pods, and the spare nodes, as occupied."""
        request_json = request_json_for(request.plan.worker_request, request.spec.workers.gpu_resource)
        name, namespace = request.key.name, request.key.namespace
        self._assumed_spares[request.uid] = ReservedSpares.by(request.key, request.uid, placement.spares)
        self._assumed[request.uid] = [
            PodRequest(f"{name}-w{worker}", namespace, node, request_json, name, request.uid)
            for worker, node in placement.nodes.items()
            if worker not in request.assigned_nodes
        ]

    def _release_assumed(self, uid: str) -> None:
        """Drops the assumed pods: either the job's pods exist now, or it will be placed again."""
        self._assumed.pop(uid, None)
        self._assumed_spares.pop(uid, None)

    def _avoided_now(self, uid: str) -> dict[str, str]:
        """Node -> why this job avoids it now."""
        now = time.monotonic()
        current = {name: entry for name, entry in self._avoided.get(uid, {}).items() if entry[0] > now}
        if uid in self._avoided:
            self._avoided[uid] = current
        return {name: why for name, (_, why) in current.items()}


class _Snapshot:
    """Nodes and pods at one moment, for the job to place and the jobs ahead of it. Runs in a thread."""

    def __init__(
        self,
        *,
        ahead: Sequence[PlacementRequest],
        avoided: Mapping[str, Mapping[str, str]],
        empty: Mapping[str, Inventory],
        pod_requests: Sequence[PodRequest],
        spares: Sequence[ReservedSpares],
        calibration: Calibration,
    ) -> None:
        self._ahead = ahead
        self._avoided = avoided
        self._empty = empty
        self._pod_requests = pod_requests
        self._spares = spares
        self._calibration = calibration
        self._known: dict[tuple[object, ...], Inventory] = {}
        self.warnings: tuple[str, ...] = ()
        """Problems with nodes or pods that were ignored, for the job that was placed."""

    def place(self, request: PlacementRequest) -> Placement:
        """Nodes for the job's workers.

        Raises:
            DoesNotFitError: The job does not fit now. The message names what is missing and what would have to end.
            _QueuedError: The job fits, but a job ahead of it in the queue gets the nodes.
        """
        if request.restarts:
            # Its own pods are deleted first, and then a job ahead of it could take their GPUs.
            self._pod_requests = [
                pod_request for pod_request in self._pod_requests if pod_request.job_uid != request.uid
            ]
        ahead_claims = claims_ahead(
            self._ahead, request.requested_at, self._free, self._without_jobs, self._calibration
        )
        free = self._free(request)
        self.warnings = free.warnings
        try:
            rest = excluding(free, ahead_claims.reserved)
            return with_spares(placement_for(request, rest, self._calibration), rest, request.spec.recovery.spare_nodes)
        except DoesNotFitError as error:
            if ahead_claims.blocked_by is not None and nodes_for(request, free, self._calibration):
                raise _QueuedError(ahead_claims.blocked_by) from None
            largest_first = occupants(self._pod_requests, request.spec.workers.gpu_resource, request.uid)
            hint = capacity_hint(
                largest_first, free, lambda freed: any(has_capacity(plan, freed) for plan in request.plans)
            )
            count = len(self._ahead)
            queued = f"{counted(count, 'job')} {'is' if count == 1 else 'are'} ahead in the queue" if count else ""
            error.args = (sentences(str(error), hint, queued),)
            raise

    def _free(self, queued: PlacementRequest) -> Inventory:
        own_uid = queued.uid if queued.reuses_own_pods else ""
        inventory = self._inventory(queued, "free", own_uid)
        return excluding(inventory, {**reserved_for_others(self._spares, queued.uid), **self._avoided[queued.uid]})

    def _without_jobs(self, queued: PlacementRequest) -> Inventory:
        return self._inventory(queued, "without jobs", "")

    def _inventory(self, queued: PlacementRequest, kind: str, uid: str) -> Inventory:
        """The nodes without what pods request on them.

        Args:
            queued: The job.
            kind: `free` counts all pods but those of the job `uid`, `without jobs` only foreign pods.
            uid: The job whose pods do not count; empty for none.
        """
        key = (kind, uid, NodeRequirements.of(queued.spec))
        if key not in self._known:
            if kind == "without jobs":
                counted = [pod_request for pod_request in self._pod_requests if not pod_request.job_uid]
            else:
                counted = [pod_request for pod_request in self._pod_requests if not uid or pod_request.job_uid != uid]
            used, malformed = requested_by_node(counted, queued.spec.workers.gpu_resource)
            self._known[key] = self._empty[queued.uid].holding(used, malformed)
        return self._known[key]
