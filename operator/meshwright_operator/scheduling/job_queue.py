"""The line of jobs that wait for room, and what it takes from those that stand behind.

Higher `spec.priority` first; at the same priority those that hold pods (a gang that waits for one replacement idles all
its other GPUs), then the older job. A job leaves their nodes to all those ahead of it that fit now. One that does not
fit is passed by: free GPUs serve whom they fit. But not for ever: after `RESERVE_SECONDS` it reserves every node it
could use, and nobody behind it gets a place there until it starts. So small jobs cannot keep a large one waiting
without bound, and a job that would not fit even if all other jobs ended reserves nothing.

In memory only: after a restart the line forms again while jobs are looked at, and since when each waits stands in its
status.
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
from meshwright_operator.decide.gang import Place
from meshwright_operator.decide.observed import Observed
from meshwright_operator.decide.restart_policy import SPEC_CHANGED
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.timestamps import parse_time

RESERVE_SECONDS = 120.0
"""How long a job is passed by before it reserves."""
STALE_SECONDS = 60.0
"""A job that has not asked for so long does not wait any more, whatever it said last."""
LOOK_AHEAD = 64
"""How many jobs ahead are looked at: what stands further behind waits for long in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """One job's wish for nodes."""

    key: JobKey
    uid: str
    plan: Plan
    spec: ParallelTrainingJobSpec
    created: str
    """`metadata.creationTimestamp`."""
    since: datetime
    """Since when it waits for room."""
    requested_at: datetime
    """When it asked last."""
    assigned_nodes: Mapping[int, str] = field(default_factory=dict)
    """Worker -> node of those that stay."""

    restarts: bool = False
    """Whether its own pods give way to the new ones: an edit restarts the whole gang."""
    other_plans: Sequence[Plan] = ()
    """Further plans that would do as well, while the job is free to take any."""
    previous: PreviousPlacement | None = None
    """Where it was last."""

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
            key: the job.
            job: its object.
            observed: the job as it is to run.
            since: since when it waits.
            restarts: whether its own pods give way to the new ones.
            assigned_nodes: workers that stay.
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
        """The request for the workers that a decision wants to place."""
        observed = decision.observed
        placed = find(observed.status.conditions, names.PLACED)
        since = parse_time(placed.last_transition_time) if placed is not None and placed.status == "False" else None
        restarts = decision.mesh.pending_cause == SPEC_CHANGED.name
        return cls.of(
            key, job, observed, since=since or observed.now, restarts=restarts, assigned_nodes=step.assigned_nodes
        )

    @property
    def holds_pods(self) -> bool:
        """Whether what its own pods hold is its own to use."""
        return self.restarts or bool(self.assigned_nodes)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Everything it would run as, the one to prefer first."""
        return (self.plan, *self.other_plans)

    @property
    def sort_key(self) -> tuple[int, bool, str, str]:
        """Its place in the line; the smallest is first."""
        return -self.spec.priority, not self.holds_pods, self.created, self.uid


@dataclass(frozen=True, slots=True)
class QueueTurn:
    """What the line leaves to one job."""

    reserved: Mapping[str, str] = field(default_factory=dict)
    """Node -> why it is not for this job."""
    blocked_by: PlacementRequest | None = None
    """The first job ahead that fits now."""


class JobQueue:
    """Jobs that asked for room and did not get it."""

    def __init__(self) -> None:
        self._requests: dict[str, PlacementRequest] = {}

    def add(self, request: PlacementRequest) -> None:
        """The job waits, or still does."""
        self._requests[request.uid] = request

    def remove(self, uid: str) -> None:
        """The job waits no more."""
        self._requests.pop(uid, None)

    def ahead_of(self, request_behind: PlacementRequest) -> list[PlacementRequest]:
        """Jobs that go before this one, first to last."""
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
        """Those at the head of the line, who look again when room has changed."""
        return [w.key for w in sorted(self._requests.values(), key=lambda request: request.sort_key)[:count]]


def claims_ahead(
    ahead: Iterable[PlacementRequest],
    now: datetime,
    free: Callable[[PlacementRequest], Inventory],
    without_jobs: Callable[[PlacementRequest], Inventory],
    calibration: Calibration,
) -> QueueTurn:
    """What is left to a job with `ahead` before it.

    Args:
        ahead: jobs that go before it, first to last.
        now: the present.
        free: the nodes as a job sees them now.
        without_jobs: the nodes as it would see them if all jobs ended.
        calibration: what was learned about the cluster's GPUs.
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
    """The nodes on which the job would be placed; none when it cannot be."""
    if not request.assigned_nodes and not any(has_capacity(plan, inventory) for plan in request.plans):
        return set()
    try:
        return set(placement_for(request, inventory, calibration).nodes.values())
    except DoesNotFitError:
        return set()


def placement_for(request: PlacementRequest, inventory: Inventory, calibration: Calibration) -> Placement:
    """Nodes for the job as it would take them: of its plans the best one there, and near to where it was.

    Raises:
        DoesNotFitError: there is no room.
    """
    cost_model = cost_model_for(request.spec, request.plan.architecture, inventory, calibration)
    if request.other_plans:
        return place_best(request.plans, inventory, cost_model)
    return place_plan(request.plan, inventory, cost_model, request.assigned_nodes, request.previous)


def has_capacity(plan: Plan, inventory: Inventory) -> bool:
    """Whether there is room for all of the plan's workers: by counting, without looking for the best places."""
    return FreeCapacity(plan, inventory, {}).total_blocks() >= GangShape(plan).blocks


def excluding(inventory: Inventory, taken: Mapping[str, str]) -> Inventory:
    """The inventory with these nodes (name -> why) out of use."""
    nodes = dict(inventory.nodes)
    for name, why in taken.items():
        if name in nodes and not nodes[name].unusable:
            nodes[name] = replace(nodes[name], unusable=why)
    return replace(inventory, nodes=nodes)


def _fits_node(plan: Plan, node: Node) -> bool:
    return node.free.fits(plan.worker_request) > 0


class ReservedSpares(NamedTuple):
    """Nodes that one job keeps free for the day it loses one: no other job's while it holds pods.

    They stand in its `status.placement.spares`, so a restarted operator keeps the same.
    """

    uid: str
    why: str
    nodes: tuple[str, ...]

    @classmethod
    def by(cls, key: JobKey, uid: str, nodes: Iterable[str]) -> ReservedSpares:
        """What the job of this name keeps."""
        return cls(uid, f"kept as a spare for job {key}", tuple(nodes))


def reserved_spares(cache: Cache) -> list[ReservedSpares]:
    """The spares of every job that holds pods: no more of them than its spec still asks for."""
    found = []
    for key, job in cache.jobs.items():
        count, nodes = _get_path(job, "spec", "recovery", "spareNodes"), _get_path(job, "status", "placement", "spares")
        if not isinstance(count, int) or not isinstance(nodes, list) or count < 1 or not nodes:
            continue
        uid = str(job["metadata"].get("uid", ""))
        if any(not pod.terminal for pod in cache.pods(key, uid)):
            found.append(ReservedSpares.by(key, uid, map(str, nodes[:count])))
    return found


def reserved_for_others(reserved: Iterable[ReservedSpares], uid: str) -> Mapping[str, str]:
    """Node -> why it is not for the job `uid`."""
    return {node: one.why for one in reserved if one.uid != uid for node in one.nodes}


def _get_path(obj: object, *path: str) -> object:
    """What stands there; None where nothing does, or the object is malformed: then it keeps nothing."""
    for name in path:
        obj = obj.get(name) if isinstance(obj, Mapping) else None
    return obj
