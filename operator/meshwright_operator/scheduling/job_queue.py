"""The queue of jobs that wait for nodes, in the order in which they get them.

Jobs are ordered by `spec.priority`, as far as the administrator's policy allows it. At the same priority, gangs that
hold pods come first, because a gang that waits for one replacement leaves all its other GPUs idle. Then comes the job
whose namespace uses the fewest GPUs for its weight, then the older job.

A job is in the queue from its first request until it is placed or withdrawn, however long ago it was looked at. The
queue is in memory only. After a restart it is rebuilt while jobs are reconciled; status records since when each job
waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import NamedTuple

from meshwright.api import conditions as names
from meshwright.api.conditions import find
from meshwright.api.objects import KubeObject
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.placement import Placement, PreviousPlacement
from meshwright.planner.plan import Plan
from meshwright_operator.decide.admission import Domain
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.gang_actions import Place, Size, size_of
from meshwright_operator.decide.observed import Observed, has_started
from meshwright_operator.decide.placement_outcome import NotGranted
from meshwright_operator.decide.restart_policy import SPEC_CHANGED
from meshwright_operator.decide.sizing import current_size, elastic_of
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.scheduling.policy import Policy
from meshwright_operator.scheduling.preemption import Victim
from meshwright_operator.timestamps import parse_time


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
    sizes: tuple[Size, ...] = ()
    """Of an elastic job, the sizes to try, the preferred one first. The first one that fits is granted."""
    grows: bool = False
    """Whether the job trains, and asks for more replicas. Jobs of the same priority that wait come first."""
    spares_beyond: int | None = None
    """The number of replicas above which it leaves its spare nodes free (`elastic.fill`); None if there is none."""
    restarts: bool = False
    """Whether its own pods are deleted first, because an edit restarts the gang."""
    other_plans: Sequence[Plan] = ()
    """Other plans that are equally good, if the job has not started yet."""
    previous: PreviousPlacement | None = None
    """Its last placement."""
    domains: tuple[Domain, ...] = ()
    """The parts of the cluster that a queue assigned to its workers. Empty: the whole cluster."""

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
        sizes: tuple[Size, ...] = (),
        grows: bool = False,
    ) -> PlacementRequest:
        """The request of one job.

        Args:
            key: The job's key.
            job: The job's object.
            observed: The job with the spec and plan to run.
            since: Since when it waits for nodes.
            restarts: Whether its own pods are deleted first.
            assigned_nodes: Worker -> node, of the workers whose pods continue.
            sizes: Of an elastic job, the sizes to try.
            grows: Whether the job trains, and asks for more replicas.
        """
        return cls(
            key=key,
            uid=observed.uid,
            plan=observed.plan,
            other_plans=observed.other_plans,
            spec=observed.placed_spec,
            domains=observed.admission.domains if observed.admission is not None else (),
            created=str(job["metadata"].get("creationTimestamp") or ""),
            since=since,
            requested_at=observed.now,
            assigned_nodes=assigned_nodes or {},
            sizes=sizes,
            grows=grows,
            spares_beyond=_spares_beyond(observed),
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
            key,
            job,
            observed,
            since=since or observed.now,
            restarts=restarts,
            assigned_nodes=step.assigned_nodes,
            sizes=step.sizes,
            grows=decision.grow is step and decision.move is not step,
        )

    @property
    def reuses_own_pods(self) -> bool:
        """Whether the job may use the resources of its own pods."""
        return self.restarts or bool(self.assigned_nodes)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans it can run with, the preferred one first."""
        return tuple(size.plan for size in self.sizes) or (self.plan, *self.other_plans)

    @property
    def smallest(self) -> PlacementRequest:
        """The request with the smallest size only."""
        return replace(self, plan=self.sizes[-1].plan, sizes=self.sizes[-1:]) if len(self.sizes) > 1 else self

    def kept_in(self, placement: Placement) -> Mapping[int, str]:
        """Worker of the plan -> node, of the workers whose pods continue with this placement."""
        granted = size_of(self.sizes, placement)
        return granted.kept if granted is not None else self.assigned_nodes

    def same_as(self, other: PlacementRequest) -> bool:
        """Whether both ask for the same, so that the answer to one is the answer to the other."""
        return (
            self.restarts == other.restarts
            and self.assigned_nodes == other.assigned_nodes
            and self.grows == other.grows
            and self.spares_beyond == other.spares_beyond
            and [(one.plan_workers, one.kept) for one in self.sizes]
            == [(one.plan_workers, one.kept) for one in other.sizes]
            and self.spec == other.spec
            and len(self.plans) == len(other.plans)
            and all(a is b or a == b for a, b in zip(self.plans, other.plans, strict=True))
            and self.previous == other.previous
            and self.domains == other.domains
        )


def _spares_beyond(observed: Observed) -> int | None:
    """See `PlacementRequest.spares_beyond`. A job that has lost a node takes its spare node to keep its size."""
    if observed.elastic is None or not elastic_of(observed).fill:
        return None
    return max(observed.elastic.replicas, current_size(observed) if has_started(observed.status) else 0)


class Basis(NamedTuple):
    """What the answer to a request depends on, besides the request."""

    freed: int
    """Version of the free capacity."""
    changed: int
    """Version of all capacity."""
    due: bool
    """Whether the job had waited long enough to reserve nodes."""
    avoided: tuple[str, ...]
    """Nodes that rejected its pods."""
    rested: bool = False
    """Whether the pause of a job that may give up replicas has ended since the last attempt."""


@dataclass(slots=True)
class Member:
    """A job in the queue, and what is known from the last attempt to place it."""

    request: PlacementRequest
    attempted: int = -1
    """Version of the free capacity at the last attempt; -1 before the first."""
    due: bool = False
    """Whether the job had waited long enough then to reserve nodes."""
    fits: bool = False
    """Whether the job fitted then. Its nodes are left to it until it asks for them."""
    claims: Mapping[str, str] = field(default_factory=dict)
    """Node -> why jobs behind this one cannot use it."""
    reserved: tuple[str, ...] = ()
    """The nodes reserved for it, because it has waited long enough."""
    answer: NotGranted | None = None
    """The answer to its last request."""
    answered: Basis | None = None
    """What the answer depends on."""
    undelivered: bool = False
    """Whether the job has not asked since its answer was found."""
    wanted: bool = False
    """Whether its reconcile left without an answer, and runs again when there is one."""
    excess: str = ""
    """Why the administrator's policy does not let it start now."""
    victims: dict[str, Victim] = field(default_factory=dict)
    """uid -> how far this job has to shrink for it, or that it has to stop. It stays so until this job has started."""
    rests_until: datetime | None = None
    """At the last attempt, the first end of the pause of a job that will give up replicas then."""
    asked: float = 0.0
    """When it asked last, on the monotonic clock."""

    @property
    def rested(self) -> bool:
        """Whether that pause has ended."""
        return self.rests_until is not None and self.request.requested_at >= self.rests_until


class JobQueue:
    """Jobs that requested nodes and did not get them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._members: dict[str, Member] = {}
        self.policy = Policy()
        self.version = 0
        """Changes with every job that comes or leaves, and with every other request of a job."""

    def __len__(self) -> int:
        """The number of jobs."""
        return len(self._members)

    def put(self, request: PlacementRequest) -> Member:
        """Adds a job, or updates its request."""
        member = self._members.get(request.uid)
        if member is None:
            self.version += 1
            member = self._members[request.uid] = Member(request)
        elif not request.same_as(member.request):
            # The reservation stays: it follows the job's new request at the next attempt.
            self.version += 1
            member = self._members[request.uid] = Member(
                request, claims=member.claims, reserved=member.reserved, victims=member.victims
            )
        member.request, member.asked = request, self._clock()
        return member

    def get(self, uid: str) -> Member | None:
        """The job with this uid; None if it is not in the queue."""
        return self._members.get(uid)

    def remove(self, uid: str) -> Member | None:
        """Removes a job, and returns it; None if it was not in the queue."""
        member = self._members.pop(uid, None)
        self.version += member is not None
        return member

    def members(self) -> list[Member]:
        """All jobs, in any order."""
        return list(self._members.values())

    def requests(self) -> list[PlacementRequest]:
        """The requests of all jobs, in any order."""
        return [member.request for member in self._members.values()]

    def ordered(self, in_use: Callable[[str], int]) -> list[Member]:
        """All jobs, first to last. `in_use` returns the GPUs that the jobs of a namespace use now."""
        position = self.position(in_use)
        return sorted(self._members.values(), key=lambda member: position(member.request))

    def position(self, in_use: Callable[[str], int]) -> Callable[[PlacementRequest], QueuePosition]:
        """A function from a request to its position in the queue; the smallest is first."""
        shares: dict[str, float] = {}

        def position(request: PlacementRequest) -> QueuePosition:
            namespace = request.key.namespace
            if namespace not in shares:
                shares[namespace] = in_use(namespace) / self.policy.of(namespace).weight
            priority = self.policy.of(namespace).priority.clamp(request.spec.priority)
            return QueuePosition(
                -priority, request.grows, not request.reuses_own_pods, shares[namespace], request.created, request.uid
            )

        return position


class QueuePosition(NamedTuple):
    """A job's position in the queue."""

    priority: int
    """The negative priority."""
    grows: bool
    without_pods: bool
    share: float
    """GPUs that the namespace's jobs use, divided by the namespace's weight."""
    created: str
    uid: str
