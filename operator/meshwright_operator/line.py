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

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.choose import place_best, place_plan
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.inventory import Inventory, Node
from meshwright.planner.placement import Before, Placement
from meshwright.planner.plan import Plan
from meshwright.planner.pricing import Calibration, pricer_for
from meshwright.planner.room import Room, Shape
from meshwright_operator.cache import JobKey

RESERVE_SECONDS = 120.0
"""How long a job is passed by before it reserves."""
STALE_SECONDS = 60.0
"""A job that has not asked for so long does not wait any more, whatever it said last."""
LOOK_AHEAD = 64
"""How many jobs ahead are looked at: what stands further behind waits for long in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """One job's wish for nodes."""

    key: JobKey
    uid: str
    plan: Plan
    spec: ParallelTrainingJobSpec
    created: str
    """`metadata.creationTimestamp`."""
    since: datetime
    """Since when it waits for room."""
    asked: datetime
    """When it asked last."""
    keep: Mapping[int, str] = field(default_factory=dict)
    """Worker -> node of those that stay."""

    restarts: bool = False
    """Whether its own pods give way to the new ones: an edit restarts the whole gang."""
    others: Sequence[Plan] = ()
    """Further plans that would do as well, while the job is free to take any."""
    calibration: Calibration = field(default_factory=Calibration)
    """What was learnt about the GPUs: prices tell plans apart where they land."""
    before: Before | None = None
    """Where it was last."""

    @property
    def holds(self) -> bool:
        """Whether what its own pods hold is its own to use."""
        return self.restarts or bool(self.keep)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Everything it would run as, the one to prefer first."""
        return (self.plan, *self.others)

    @property
    def order(self) -> tuple[int, bool, str, str]:
        """Its place in the line; the smallest is first."""
        return -self.spec.priority, not self.holds, self.created, self.uid


@dataclass(frozen=True, slots=True)
class Turn:
    """What the line leaves to one job."""

    reserved: Mapping[str, str] = field(default_factory=dict)
    """Node -> why it is not for this job."""
    yield_to: Waiting | None = None
    """The first job ahead that fits now."""


class Line:
    """Jobs that asked for room and did not get it."""

    def __init__(self) -> None:
        self._waiting: dict[str, Waiting] = {}

    def join(self, waiting: Waiting) -> None:
        """The job waits, or still does."""
        self._waiting[waiting.uid] = waiting

    def leave(self, uid: str) -> None:
        """The job waits no more."""
        self._waiting.pop(uid, None)

    def ahead_of(self, asker: Waiting) -> list[Waiting]:
        """Jobs that go before this one, first to last."""
        stale = [w.uid for w in self._waiting.values() if (asker.asked - w.asked).total_seconds() > STALE_SECONDS]
        for uid in stale:
            del self._waiting[uid]
        ahead = [w for w in self._waiting.values() if w.uid != asker.uid and w.order < asker.order]
        return sorted(ahead, key=lambda waiting: waiting.order)[:LOOK_AHEAD]

    def next_up(self, count: int) -> list[JobKey]:
        """Those at the head of the line, who look again when room has changed."""
        return [w.key for w in sorted(self._waiting.values(), key=lambda waiting: waiting.order)[:count]]


def turn(
    ahead: Iterable[Waiting],
    now: datetime,
    free: Callable[[Waiting], Inventory],
    whole: Callable[[Waiting], Inventory],
) -> Turn:
    """What is left to a job with `ahead` before it.

    Args:
        ahead: jobs that go before it, first to last.
        now: the present.
        free: the nodes as a job sees them now.
        whole: the nodes as it would see them if all jobs ended.
    """
    reserved: dict[str, str] = {}
    first: Waiting | None = None
    for waiting in ahead:
        nodes = nodes_for(waiting, without(free(waiting), reserved))
        if nodes:
            first = first or waiting
            reserved |= {name: f"next for job {waiting.key}" for name in nodes}
            continue
        if (now - waiting.since).total_seconds() < RESERVE_SECONDS:
            continue
        empty = whole(waiting)
        if any(enough(plan, empty) for plan in waiting.plans):
            why = f"reserved for job {waiting.key}"
            reserved |= {n.name: why for n in empty.usable if _serves(waiting.plan, n) and n.name not in reserved}
    return Turn(reserved, first)


def nodes_for(waiting: Waiting, inventory: Inventory) -> set[str]:
    """The nodes on which the job would be placed; none when it cannot be."""
    if not waiting.keep and not any(enough(plan, inventory) for plan in waiting.plans):
        return set()
    try:
        return set(placement_for(waiting, inventory).nodes.values())
    except DoesNotFitError:
        return set()


def placement_for(waiting: Waiting, inventory: Inventory) -> Placement:
    """Nodes for the job as it would take them: of its plans the best one there, and near to where it was.

    Raises:
        DoesNotFitError: there is no room.
    """
    pricer = pricer_for(waiting.spec, waiting.plan.architecture, inventory, waiting.calibration)
    if waiting.others:
        return place_best(waiting.plans, inventory, pricer)
    return place_plan(waiting.plan, inventory, pricer, waiting.keep, waiting.before)


def enough(plan: Plan, inventory: Inventory) -> bool:
    """Whether there is room for all of the plan's workers: by counting, without looking for the best places."""
    return Room(plan, inventory, {}).total_blocks() >= Shape(plan).blocks


def without(inventory: Inventory, taken: Mapping[str, str]) -> Inventory:
    """The inventory with these nodes (name -> why) out of use."""
    nodes = dict(inventory.nodes)
    for name, why in taken.items():
        if name in nodes and not nodes[name].unusable:
            nodes[name] = replace(nodes[name], unusable=why)
    return replace(inventory, nodes=nodes)


def _serves(plan: Plan, node: Node) -> bool:
    return node.free.fits(plan.worker_request) > 0
