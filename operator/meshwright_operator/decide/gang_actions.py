"""The actions with which a gang gets to its next mesh generation. A decision has one of them at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.planner.placement import Placement
from meshwright.planner.plan import Plan
from meshwright_operator.decide.observed import Worker
from meshwright_operator.kube.pod_info import Pod


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete these pods."""

    pods: tuple[Pod, ...]
    why: str
    """The reason, as the end of a sentence: `node n5 is down`."""
    avoid: Mapping[str, str] = field(default_factory=dict)
    """Node -> why not to place the job there for a while."""
    replaces_agents: bool = False
    """Whether the pods are deleted because their agents do not poll. Status counts these deletions."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for an event, or for `seconds`."""

    message: str
    reason: str = ""
    """CamelCase, if a problem needs a user's or an administrator's attention; empty for a normal wait."""
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Size:
    """A layout with which an elastic job could run, and which worker then runs which ranks."""

    plan: Plan
    plan_workers: Mapping[int, int]
    """Worker -> worker of the plan."""
    kept: Mapping[int, str]
    """Worker of the plan -> node, of the workers whose pods continue."""

    @property
    def replicas(self) -> int:
        """Data-parallel replicas."""
        return self.plan.layout.data

    @property
    def new_workers(self) -> tuple[int, ...]:
        """The workers that need pods."""
        return tuple(worker for worker, plan_worker in self.plan_workers.items() if plan_worker not in self.kept)


def size_of(sizes: Sequence[Size], placement: Placement) -> Size | None:
    """The size that was placed. None for a job that is not elastic."""
    same = (size for size in sizes if size.plan.layout == placement.plan.layout)
    return next((size for size in same if size.kept.items() <= placement.nodes.items()), None)


@dataclass(frozen=True, slots=True)
class Place:
    """Find nodes for the workers without a pod."""

    workers: tuple[Worker, ...]
    assigned_nodes: Mapping[int, str] = field(default_factory=dict)
    """Worker -> node, of the workers whose pods continue."""
    sizes: tuple[Size, ...] = ()
    """Of an elastic job, the sizes to try, the preferred one first. The first one that fits is used."""


@dataclass(frozen=True, slots=True)
class Ungate:
    """Start the gang: every pod has a node."""

    pods: tuple[Pod, ...]


@dataclass(frozen=True, slots=True)
class FormGeneration:
    """Form the next generation: every agent polls for it."""


@dataclass(frozen=True, slots=True)
class EndAttempt:
    """End this attempt to start the gang, and release its nodes."""

    reason: str
    """CamelCase, for the condition."""
    message: str
    pods: tuple[Pod, ...] = ()
    """The pods that failed to start."""
    avoid: Mapping[str, str] = field(default_factory=dict)
    """Node -> why not to place the job there for a while."""


@dataclass(frozen=True, slots=True)
class MapRanks:
    """Map ranks onto the nodes to which another scheduler has bound the pods."""

    pods: Mapping[int, str]
    """Worker -> node."""
    assigned_plan_workers: Mapping[int, int]
    """Worker -> worker of the plan, for the workers whose ranks are assigned already."""


GangAction = Delete | Wait | Place | Ungate | EndAttempt | FormGeneration | MapRanks
