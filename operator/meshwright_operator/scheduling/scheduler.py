"""Placing one job at a time: the one lock over all jobs, what every pod holds, the planner's choice.

What a job was given is promised to it until its pods are made, so that no two jobs get the same GPUs: from then on the
pods themselves, gated but pinned, hold the room.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cost_model import Calibration
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.placement import Placement, with_spares
from meshwright_operator.kube.cache import Cache
from meshwright_operator.kube.client import KubeClient
from meshwright_operator.kube.pod_requests import PodRequest, request_json_for, requested_by_node
from meshwright_operator.metrics.operator_metrics import OperatorMetrics
from meshwright_operator.scheduling.capacity_hint import capacity_hint, holders
from meshwright_operator.scheduling.foreign_pods import ForeignPods
from meshwright_operator.scheduling.inventory_cache import InventoryCache, node_requirements
from meshwright_operator.scheduling.job_queue import (
    JobQueue,
    PlacementRequest,
    claims_ahead,
    excluding,
    has_capacity,
    nodes_for,
    placement_for,
)
from meshwright_operator.scheduling.spare_nodes import ReservedSpares, reserved_for_others, reserved_spares

AVOID_SECONDS = 900.0
"""How long a job keeps off a node that did not take its pod: what was in the way may be gone by then."""


class WaitsForTurnError(Exception):
    """There is room, but a job ahead in the line fits it too and goes first."""

    def __init__(self, ahead: PlacementRequest) -> None:
        super().__init__(f"there is room, but job {ahead.key} is ahead in the line and fits it too")
        self.ahead = ahead.key


class JobScheduler:
    """Finds nodes for workers, and keeps the line of jobs for which there are none."""

    def __init__(self, cluster: KubeClient, cache: Cache, metrics: OperatorMetrics, namespaces: Sequence[str]) -> None:
        self._cache = cache
        self._foreign_pods = ForeignPods(cluster, cache, namespaces)
        self._inventory_cache = InventoryCache(cache)
        self._metrics = metrics
        self.lock = asyncio.Lock()
        """Held while a job is placed."""
        self.job_queue = JobQueue()
        self.calibration = Calibration()
        """What running jobs taught about this cluster's GPUs; plans are made with it."""
        self.warnings: tuple[str, ...] = ()
        """What was strange about the nodes and pods that the last placement saw; read it with the lock held."""
        self._avoided: dict[str, dict[str, tuple[float, str]]] = {}
        self._assumed: dict[str, list[PodRequest]] = {}
        self._assumed_spares: dict[str, ReservedSpares] = {}
        """Spares of those that were promised something: their pods do not hold them yet."""

    def nodes(self, spec: ParallelTrainingJobSpec) -> Inventory:
        """The nodes as the job sees them, as if nothing ran on them: enough to plan."""
        return self._inventory_cache.empty(spec)

    def unusable_nodes(self, spec: ParallelTrainingJobSpec, names: Iterable[str]) -> Mapping[str, str]:
        """Of these nodes, those that take no pod of the job (any more), and why."""
        nodes = self._inventory_cache.empty(spec).nodes
        found = (nodes[name] for name in sorted(set(names)) if name in nodes)
        return {node.name: node.unusable for node in found if node.unusable and node.capacity.gpus}

    async def place(self, request: PlacementRequest) -> Placement:
        """A node for every worker; those in `request.keep` stay. Call it with the lock held.

        Raises:
            DoesNotFitError: there is no room now; the text says what is short and what would have to end.
            TurnError: there is, but a job ahead in the line gets it.
            ApiError: the pods of others could not be listed.
        """
        started = time.monotonic()
        result = "error"
        try:
            pod_requests = await self._foreign_pods.pod_requests()
            pod_requests += [pod_request for assumed in self._assumed.values() for pod_request in assumed]
            ahead = self.job_queue.ahead_of(request)
            avoided = {queued.uid: self.avoided(queued.uid) for queued in (request, *ahead)}
            empty = {queued.uid: self._inventory_cache.empty(queued.spec) for queued in (request, *ahead)}
            snapshot = _Snapshot(
                avoided, empty, pod_requests, [*reserved_spares(self._cache), *self._assumed_spares.values()]
            )
            result = "no_room"
            try:
                placement = await asyncio.to_thread(snapshot.place, request, ahead)
            finally:
                self.warnings = snapshot.warnings
            result = "placed"
            self._metrics.placement_cost.observe(placement.cost)
            return placement
        finally:
            self._metrics.placement_attempts.labels(result).inc()
            self._metrics.placement_seconds.observe(time.monotonic() - started)

    def assume(self, request: PlacementRequest, placement: Placement, workers: Iterable[int]) -> None:
        """Keeps for the job what these workers were given, until `release_assumed`. Call it with the lock held."""
        request_json = request_json_for(request.plan.worker_request, request.spec.workers.gpu_resource)
        name, namespace = request.key.name, request.key.namespace
        self._assumed_spares[request.uid] = ReservedSpares.by(request.key, request.uid, placement.spares)
        self._assumed[request.uid] = [
            PodRequest(f"{name}-w{worker}", namespace, placement.nodes[worker], request_json, name, request.uid)
            for worker in workers
        ]

    def release_assumed(self, uid: str) -> None:
        """The job's pods are made and hold their room themselves, or they will be placed anew."""
        self._assumed.pop(uid, None)
        self._assumed_spares.pop(uid, None)

    async def fits_elsewhere(self, request: PlacementRequest) -> bool:
        """Whether the workers that are not in `request.keep` find other nodes, without taking anybody's turn."""
        try:
            await self.place(request)
        except (DoesNotFitError, WaitsForTurnError):
            return False
        return True

    def avoid(self, uid: str, nodes: Mapping[str, str]) -> None:
        """Keeps this job (its uid) off these nodes (name -> why) for a while."""
        if not nodes:
            return
        until = time.monotonic() + AVOID_SECONDS
        self._avoided.setdefault(uid, {}).update({name: (until, why) for name, why in nodes.items()})

    def forget(self, uid: str) -> None:
        """The job is gone."""
        self.job_queue.remove(uid)
        self._avoided.pop(uid, None)
        self.release_assumed(uid)

    def avoided(self, uid: str) -> dict[str, str]:
        """Node -> why this job keeps off it now."""
        now = time.monotonic()
        kept = {name: entry for name, entry in self._avoided.get(uid, {}).items() if entry[0] > now}
        if uid in self._avoided:
            self._avoided[uid] = kept
        return {name: why for name, (_, why) in kept.items()}


class _Snapshot:
    """Nodes and pods at one moment, as each job that is asked about sees them. Runs in a thread: it may take long."""

    def __init__(
        self,
        avoided: Mapping[str, Mapping[str, str]],
        empty: Mapping[str, Inventory],
        pod_requests: Sequence[PodRequest],
        kept: Sequence[ReservedSpares],
    ) -> None:
        self._kept = kept
        self._avoided = avoided
        self._empty = empty
        self._pod_requests = pod_requests
        self._known: dict[tuple[object, ...], Inventory] = {}
        self.warnings: tuple[str, ...] = ()
        """What was strange, as the job that was placed sees it."""

    def place(self, request: PlacementRequest, ahead: Sequence[PlacementRequest]) -> Placement:
        """Nodes for the job's workers, unless they are somebody's ahead.

        Raises:
            DoesNotFitError, TurnError: as `JobScheduler.place`.
        """
        if request.restarts:
            # They go first, and the room is then anybody's: a job ahead would take it.
            self._pod_requests = [
                pod_request for pod_request in self._pod_requests if pod_request.job_uid != request.uid
            ]
        ahead_claims = claims_ahead(ahead, request.requested_at, self._free, self._without_jobs)
        free = self._free(request)
        self.warnings = free.warnings
        try:
            rest = excluding(free, ahead_claims.reserved)
            return with_spares(placement_for(request, rest), rest, request.spec.recovery.spare_nodes)
        except DoesNotFitError as error:
            if ahead_claims.blocked_by is not None and nodes_for(request, free):
                raise WaitsForTurnError(ahead_claims.blocked_by) from None
            found = holders(self._pod_requests, request.spec.workers.gpu_resource, request.uid)
            hint = capacity_hint(found, free, lambda freed: any(has_capacity(plan, freed) for plan in request.plans))
            job_queue = f"{len(ahead)} {'job is' if len(ahead) == 1 else 'jobs are'} ahead in the line" if ahead else ""
            error.args = ("; ".join(part for part in (str(error), hint, job_queue) if part),)
            raise

    def _free(self, queued: PlacementRequest) -> Inventory:
        holding = queued.uid if queued.holds_pods else ""
        found = self._inventory(queued, "free", holding)
        return excluding(found, {**reserved_for_others(self._kept, queued.uid), **self._avoided[queued.uid]})

    def _without_jobs(self, queued: PlacementRequest) -> Inventory:
        return self._inventory(queued, "whole", "")

    def _inventory(self, queued: PlacementRequest, kind: str, uid: str) -> Inventory:
        """The nodes with what pods hold on them: of all but the job `uid`, or (`whole`) of those of no job."""
        key = (kind, uid, node_requirements(queued.spec))
        if key not in self._known:
            if kind == "whole":
                counted = [pod_request for pod_request in self._pod_requests if not pod_request.job_uid]
            else:
                counted = [pod_request for pod_request in self._pod_requests if not uid or pod_request.job_uid != uid]
            used, malformed = requested_by_node(counted, queued.spec.workers.gpu_resource)
            self._known[key] = self._empty[queued.uid].holding(used, malformed)
        return self._known[key]
