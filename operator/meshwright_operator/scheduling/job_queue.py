"""The queue of jobs that wait for nodes, and what it reserves for the jobs at its head.

Jobs are ordered by `spec.priority`. At the same priority, jobs with pods come first, then older jobs: a gang that waits
for one replacement leaves all its other GPUs idle. A job cannot use nodes that a job ahead of it would get
now. A job that does not fit is passed by for `RESERVE_SECONDS`. After that it reserves every node it could use, so that
smaller jobs behind it cannot delay it without limit. A job that would not fit even if all other jobs ended reserves
nothing.

The queue is in memory only. After a restart it is rebuilt while jobs are reconciled; status records since when each job
waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import NamedTuple

from meshwright.api import conditions as names
from meshwright.api.conditions import find
from meshwright.api.objects import KubeObject
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.cluster.inventory import Inventory, Node
from meshwright.planner.cost_model import Calibration, cost_model_for
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.placement import Placement, PreviousPlacement
from meshwright.planner.placement.capacity import FreeCapacity, GangShape
from meshwright.planner.plan import Plan
from meshwright.planner.plan_and_place import place_best, place_plan
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.gang_actions import Place
from meshwright_operator.decide.observed import Observed
from meshwright_operator.decide.restart_policy import SPEC_CHANGED
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.timestamps import parse_time

RESERVE_SECONDS = 120.0
"""How long a job is passed by before it reserves nodes."""
STALE_SECONDS = 60.0
"""A job that has not requested nodes for this long is dropped from the queue."""
LOOK_AHEAD = 64
"""How many jobs ahead are considered: a job further back in the queue waits long in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """A job's request for nodes."""

    key: JobKey
    uid: str
    plan: Plan
    spec: ParallelTrainingJobSpec
    created: str
    """`metadata.creationTimestamp`."""
    since: datetime
    """Since when it waits for nodes."""
    requested_at: datetime
    """Time of its last request."""
    assigned_nodes: Mapping[int, str] = field(default_factory=dict)
    """Worker -> node, of the workers whose pods continue."""

    restarts: bool = False
    """Whether its own pods are deleted first, because an edit restarts the gang."""
    other_plans: Sequence[Plan] = ()
    """Other plans that are equally good, if the job has not started yet."""
    previous: PreviousPlacement | None = None
    """Its last placement."""

    @classmethod
    def of(
        cls,
        key: JobKey,
        job: KubeObject,
        observed: Observed,
        *,
        since: datetime,
        restarts: bool,
        assigned_nodes: Mapping[int, str] | None = None,
    ) -> PlacementRequest:
        """The request of one job.

        Args:
            key: The job's key.
            job: The job's object.
            observed: The job with the spec and plan to run.
            since: Since when it waits for nodes.
            restarts: Whether its own pods are deleted first.
            assigned_nodes: Worker -> node, of the workers whose pods continue.
        """
        return cls(
            key=key,
            uid=observed.uid,
            plan=observed.plan,
            other_plans=observed.other_plans,
            spec=observed.spec,
            created=str(job["metadata"].get("creationTimestamp") or ""),
            since=since,
            requested_at=observed.now,
            assigned_nodes=assigned_nodes or {},
            restarts=restarts,
            previous=PreviousPlacement.of_status(observed.status.placement),
        )

    @classmethod
    def of_decision(cls, key: JobKey, job: KubeObject, decision: Decision, step: Place) -> PlacementRequest:
        """The request for the workers that a decision places."""
        observed = decision.observed
        placed = find(observed.status.conditions, names.PLACED)
        since = parse_time(placed.last_transition_time) if placed is not None and placed.status == "False" else None
        restarts = decision.mesh.pending_cause == SPEC_CHANGED.name
        return cls.of(
            key, job, observed, since=since or observed.now, restarts=restarts, assigned_nodes=step.assigned_nodes
        )

    @property
    def reuses_own_pods(self) -> bool:
        """Whether the job may use the resources of its own pods."""
        return self.restarts or bool(self.assigned_nodes)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans it can run with, the preferred one first."""
        return (self.plan, *self.other_plans)

    @property
    def sort_key(self) -> tuple[int, bool, str, str]:
        """Its position in the queue; the smallest is first."""
        return -self.spec.priority, not self.reuses_own_pods, self.created, self.uid


@dataclass(frozen=True, slots=True)
class QueueTurn:
    """What the queue leaves to one job."""

    reserved: Mapping[str, str] = field(default_factory=dict)
    """Node -> why this job cannot use it."""
    blocked_by: PlacementRequest | None = None
    """The first job ahead that fits now."""


class JobQueue:
    """Jobs that requested nodes and did not get them."""

    def __init__(self) -> None:
        self._requests: dict[str, PlacementRequest] = {}

    def add(self, request: PlacementRequest) -> None:
        """Adds a job, or updates its request."""
        self._requests[request.uid] = request

    def remove(self, uid: str) -> None:
        """Removes a job."""
        self._requests.pop(uid, None)

    def ahead_of(self, request_behind: PlacementRequest) -> list[PlacementRequest]:
        """Jobs ahead of this one, first to last."""
        stale = [
            w.uid
            for w in self._requests.values()
            if (request_behind.requested_at - w.requested_at).total_seconds() > STALE_SECONDS
        ]
        for uid in stale:
            del self._requests[uid]
        ahead = [
            w for w in self._requests.values() if w.uid != request_behind.uid and w.sort_key < request_behind.sort_key
        ]
        return sorted(ahead, key=lambda request: request.sort_key)[:LOOK_AHEAD]

    def head(self, count: int) -> list[JobKey]:
        """The keys of the first `count` jobs, to reconcile when capacity has changed."""
        return [w.key for w in sorted(self._requests.values(), key=lambda request: request.sort_key)[:count]]


def claims_ahead(
    ahead: Iterable[PlacementRequest],
    now: datetime,
    free: Callable[[PlacementRequest], Inventory],
    without_jobs: Callable[[PlacementRequest], Inventory],
    calibration: Calibration,
) -> QueueTurn:
    """What the jobs `ahead` leave to the job behind them.

    Args:
        ahead: Jobs ahead of it, first to last.
        now: The current time.
        free: Returns the inventory of a job, with what is free now.
        without_jobs: Returns the inventory of a job, as if all jobs had ended.
        calibration: The calibrated constants of the cluster's GPUs.
    """
    reserved: dict[str, str] = {}
    first: PlacementRequest | None = None
    for request in ahead:
        nodes = nodes_for(request, excluding(free(request), reserved), calibration)
        if nodes:
            first = first or request
            reserved |= {name: f"next for job {request.key}" for name in nodes}
            continue
        if (now - request.since).total_seconds() < RESERVE_SECONDS:
            continue
        empty = without_jobs(request)
        if any(has_capacity(plan, empty) for plan in request.plans):
            why = f"reserved for job {request.key}"
            reserved |= {n.name: why for n in empty.usable if _fits_node(request.plan, n) and n.name not in reserved}
    return QueueTurn(reserved, first)


def nodes_for(request: PlacementRequest, inventory: Inventory, calibration: Calibration) -> set[str]:
    """The nodes on which the job would be placed; empty if it does not fit."""
    if not request.assigned_nodes and not any(has_capacity(plan, inventory) for plan in request.plans):
        return set()
    try:
        return set(placement_for(request, inventory, calibration).nodes.values())
    except DoesNotFitError:
        return set()


def placement_for(request: PlacementRequest, inventory: Inventory, calibration: Calibration) -> Placement:
    """The placement of the job: with the best of its plans, and with low network cost to the nodes it had before.

    Raises:
        DoesNotFitError: The job does not fit.
    """
    cost_model = cost_model_for(request.spec, request.plan.architecture, inventory, calibration)
    if request.other_plans:
        return place_best(request.plans, inventory, cost_model)
    return place_plan(request.plan, inventory, cost_model, request.assigned_nodes, request.previous)


def has_capacity(plan: Plan, inventory: Inventory) -> bool:
    """Whether all of the plan's workers fit. Only counts capacity, without choosing nodes."""
    return FreeCapacity(plan, inventory, {}).total_blocks() >= GangShape(plan).blocks


def excluding(inventory: Inventory, taken: Mapping[str, str]) -> Inventory:
    """The inventory with these nodes (name -> reason) marked as unusable."""
    nodes = dict(inventory.nodes)
    for name, why in taken.items():
        if name in nodes and not nodes[name].unusable:
            nodes[name] = replace(nodes[name], unusable=why)
    return replace(inventory, nodes=nodes)


def _fits_node(plan: Plan, node: Node) -> bool:
    return node.free.fits(plan.worker_request) > 0


class ReservedSpares(NamedTuple):
    """Spare nodes of one job. No other job gets them while the job has pods.

    They are in its `status.placement.spares`, so a restarted operator reserves the same nodes.
    """

    uid: str
    why: str
    nodes: tuple[str, ...]

    @classmethod
    def by(cls, key: JobKey, uid: str, nodes: Iterable[str]) -> ReservedSpares:
        """The spare nodes of the job with this key."""
        return cls(uid, f"spare node of job {key}", tuple(nodes))


def reserved_spares(cache: Cache) -> list[ReservedSpares]:
    """The spare nodes of every job with pods, at most as many as its spec requests."""
    spares = []
    for key, job in cache.jobs.items():
        count, nodes = _get_path(job, "spec", "recovery", "spareNodes"), _get_path(job, "status", "placement", "spares")
        if not isinstance(count, int) or not isinstance(nodes, list) or count < 1 or not nodes:
            continue
        uid = str(job["metadata"].get("uid", ""))
        if any(not pod.terminal for pod in cache.pods(key, uid)):
            spares.append(ReservedSpares.by(key, uid, map(str, nodes[:count])))
    return spares


def reserved_for_others(reserved: Iterable[ReservedSpares], uid: str) -> Mapping[str, str]:
    """Node -> why the job `uid` cannot use it."""
    return {node: one.why for one in reserved if one.uid != uid for node in one.nodes}


def _get_path(obj: object, *path: str) -> object:
    """The value at this path; None if it is missing or the object is malformed."""
    for name in path:
        obj = obj.get(name) if isinstance(obj, Mapping) else None
    return obj
