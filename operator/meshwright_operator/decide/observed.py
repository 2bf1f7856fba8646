"""Everything a decision looks at, taken together at one moment, so that deciding needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import MeshStatus, ParallelTrainingJobStatus
from meshwright.planner.plan import Plan
from meshwright.protocol.messages import WorkerState as AgentState
from meshwright_operator.decide.agents import Agents, ReceivedReport
from meshwright_operator.decide.conditions import BlockedEdit
from meshwright_operator.kube.pod_info import Pod


class WorkerState(StrEnum):
    """What became of the current incarnation of a worker."""

    MISSING = "Missing"
    """No pod: never made, or gone."""
    PENDING = "Pending"
    """Gated, unscheduled, or its container does not run yet."""
    RUNNING = "Running"
    ENDING = "Ending"
    """Being deleted; processes may still run."""
    SUCCEEDED = "Succeeded"
    CRASHED = "Crashed"
    """Ended badly by its own doing."""
    DISRUPTED = "Disrupted"
    """Ended by somebody else's doing."""
    LOST = "Lost"
    """Being deleted on a node that is down: nobody will ever say that it ended."""


ENDED = frozenset(
    {WorkerState.MISSING, WorkerState.SUCCEEDED, WorkerState.CRASHED, WorkerState.DISRUPTED, WorkerState.LOST}
)
LIVE = frozenset({WorkerState.PENDING, WorkerState.RUNNING})


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker of the plan."""

    index: int
    incarnation: int
    """Current incarnation; -1 before the first."""
    state: WorkerState
    pod: Pod | None = None
    node: str = ""
    """Where its pod is, or was last placed."""
    node_down: bool = False
    """Its node is gone or not ready."""
    node_rejection: str = ""
    """Why its pod, not bound yet, cannot go to its node any more."""
    node_drain_reason: str = ""
    """Why the node its pod runs on is about to be emptied, such as `cordoned`."""
    older_pods: tuple[Pod, ...] = ()
    """Pods of earlier incarnations that may still run."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """The API server refused to make the gang's pods."""

    reason: str
    """CamelCase, such as `QuotaExceeded`."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One job and all that belongs to it."""

    now: datetime
    name: str
    uid: str
    generation: int
    """`metadata.generation`."""
    spec: ParallelTrainingJobSpec
    revision: str
    """Hash of the parts of the spec that plan and pods are made from."""
    status: ParallelTrainingJobStatus
    plan: Plan
    workers: Sequence[Worker]
    other_plans: Sequence[Plan] = ()
    """Plans of as many workers that would do as well, while none of the job's is in effect: what is free decides."""
    excess_pods: Sequence[Pod] = ()
    """Live pods of workers that the plan does not have."""
    agents: Agents = field(default_factory=Agents)
    rejection: Rejection | None = None
    """What the last attempt to make pods met, if it was refused and that has not been decided upon yet."""

    blocked_edit: BlockedEdit | None = None
    """Why `spec` is not the object's but the one that runs."""
    fallback: Observed | None = None
    """The job as it runs, where `spec` is an edit of it that would restart the gang."""

    @property
    def mesh(self) -> MeshStatus:
        """The mesh generation as it stands in status."""
        return self.status.mesh or MeshStatus()

    @property
    def live_pods(self) -> list[Pod]:
        """Every pod of the job that may still run."""
        current = [w.pod for w in self.workers if w.pod is not None and not w.pod.terminal]
        return [*current, *(pod for w in self.workers for pod in w.older_pods), *self.excess_pods]

    def reports_in(self, state: AgentState) -> dict[int, ReceivedReport]:
        """Reports with this state of the generation and incarnations in effect, by worker index."""
        return {
            worker.index: received
            for worker in self.workers
            if (received := self.agents.reports.get(worker.index)) is not None
            and received.report.state is state
            and received.report.generation == self.mesh.generation
            and received.report.incarnation == worker.incarnation
        }


def has_started(status: ParallelTrainingJobStatus) -> bool:
    """Whether workers were ever placed; until then every look at the cluster may find a better plan."""
    return status.placement is not None or (status.mesh is not None and status.mesh.generation > 0)


def observe_workers(
    count: int,
    status: ParallelTrainingJobStatus,
    pods: Sequence[Pod],
    down: Mapping[str, bool],
    refused: Mapping[str, str],
    draining: Mapping[str, str] | None = None,
) -> tuple[list[Worker], list[Pod]]:
    """The plan's `count` workers as they stand, and live pods beyond them.

    The incarnation of a worker is the highest that status or any pod names, so that a damaged status cannot bring back
    an old one.

    Args:
        count: workers of the plan.
        status: the job's status.
        pods: the job's own pods.
        down: node -> whether it is not ready; a node that is not in it is gone.
        refused: node -> why no pod of this job may go there; a node that is not in it takes pods.
        draining: node -> why it is about to be emptied.
    """
    placed = {entry.worker: entry for entry in (status.placement.workers if status.placement else [])}
    by_worker: dict[int, list[Pod]] = {}
    for pod in pods:
        by_worker.setdefault(pod.worker, []).append(pod)
    workers = []
    for index in range(count):
        worker_pods = by_worker.pop(index, [])
        entry = placed.get(index)
        incarnation = max([entry.incarnation if entry else -1, *(pod.incarnation for pod in worker_pods)])
        current = next((pod for pod in worker_pods if pod.incarnation == incarnation), None)
        node = current.node if current is not None and current.node else entry.node if entry else ""
        is_down = bool(node) and down.get(node, True)
        older_pods = tuple(
            p for p in worker_pods if p.incarnation < incarnation and not p.terminal and not _lost(p, down)
        )
        pinned = current is not None and bool(node) and not current.bound and not current.terminal
        workers.append(
            Worker(
                index=index,
                incarnation=incarnation,
                state=_state(current, down),
                pod=current,
                node=node,
                node_down=is_down,
                node_rejection=("the node is gone" if node not in down else refused.get(node, "")) if pinned else "",
                node_drain_reason=(draining or {}).get(node, "") if current is not None and current.bound else "",
                older_pods=older_pods,
            )
        )
    excess_pods = [
        p for worker_pods in by_worker.values() for p in worker_pods if not p.terminal and not _lost(p, down)
    ]
    return workers, excess_pods


def _lost(pod: Pod, down: Mapping[str, bool]) -> bool:
    return pod.deleting and pod.bound and down.get(pod.node, True)


def _state(pod: Pod | None, down: Mapping[str, bool]) -> WorkerState:
    if pod is None:
        return WorkerState.MISSING
    if pod.phase == "Succeeded":
        return WorkerState.SUCCEEDED
    if pod.phase == "Failed":
        return WorkerState.DISRUPTED if pod.disrupted else WorkerState.CRASHED
    if pod.deleting:
        return WorkerState.LOST if _lost(pod, down) else WorkerState.ENDING
    return WorkerState.RUNNING if pod.phase == "Running" else WorkerState.PENDING
