"""The input of a decision: a job, its pods, nodes and agents' reports, observed at one moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeVar

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import MeshStatus, ParallelTrainingJobStatus, PlanStatus, WaitingEditStatus, WorkerPlacement
from meshwright.api.workers import WorkersSpec
from meshwright.planner.plan import Plan
from meshwright.protocol.messages import AgentState
from meshwright.protocol.run_config import RunConfig
from meshwright_operator.decide.admission import Admission
from meshwright_operator.decide.agents import Agents, ReceivedReport
from meshwright_operator.decide.conditions import BlockedEdit
from meshwright_operator.decide.stuck_pods import is_stuck
from meshwright_operator.decide.succeeded_workers import completed_in_reports, stored_workers
from meshwright_operator.kube.pod_info import Pod
from meshwright_operator.profiles.applied import AppliedProfile
from meshwright_operator.timestamps import parse_time, seconds_since

T = TypeVar("T")


class PodState(StrEnum):
    """The state of a worker's current incarnation."""

    MISSING = "Missing"
    """No pod: not created yet, or deleted."""
    PENDING = "Pending"
    """The pod is gated or unscheduled, or its container does not run yet."""
    RUNNING = "Running"
    ENDING = "Ending"
    """The pod is being deleted. Its processes may still run."""
    SUCCEEDED = "Succeeded"
    """The container exited with code 0, or the worker completed the run before its pod was lost."""
    CRASHED = "Crashed"
    """The container exited with an error."""
    DISRUPTED = "Disrupted"
    """The pod was evicted, preempted or stopped by the cluster."""
    LOST = "Lost"
    """The pod is being deleted on a node that is down, or is stuck: the deletion will not finish."""


LOST_WITH_POD = frozenset({PodState.MISSING, PodState.DISRUPTED, PodState.LOST})
"""States that do not matter to a worker that has completed the run."""
GONE = LOST_WITH_POD | {PodState.ENDING}
"""States of a worker that is lost, or will be."""
ENDED = frozenset({PodState.MISSING, PodState.SUCCEEDED, PodState.CRASHED, PodState.DISRUPTED, PodState.LOST})
LIVE = frozenset({PodState.PENDING, PodState.RUNNING})


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker of the plan."""

    index: int
    incarnation: int
    """Current incarnation; -1 before the first."""
    state: PodState
    pod: Pod | None = None
    node: str = ""
    """The node of its pod, or the last one it was placed on."""
    node_down: bool = False
    """Whether its node is gone or not ready."""
    node_rejection: str = ""
    """Why its node no longer accepts its pod, which is not bound yet."""
    node_drain_reason: str = ""
    """Why its node is draining, such as `cordoned`."""
    older_pods: tuple[Pod, ...] = ()
    """Pods of earlier incarnations that may still run."""
    obsolete_pods: tuple[Pod, ...] = ()
    """Ended pods of earlier incarnations, without the last one that ran: its log may show why it ended."""
    completed: bool = False
    """Whether it has completed the run in the current generation, by status or by its agent's last report."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """The API server rejected the gang's pods."""

    reason: str
    """CamelCase, such as `QuotaExceeded`."""
    message: str


@dataclass(frozen=True, slots=True)
class BindingLimits:
    """How long another scheduler may take to bind pods, in seconds. 0 means no limit."""

    unbound: float = 1800.0
    """To bind the first one: the gang may be in its queue."""
    partly_bound: float = 300.0
    """To bind the others after the first one."""

    def of(self, spec: ParallelTrainingJobSpec) -> BindingLimits:
        """The limits of a job, whose spec precedes the operator's settings."""
        first, others = spec.recovery.unbound_seconds, spec.recovery.partly_bound_seconds
        return BindingLimits(
            self.unbound if first is None else float(first), self.partly_bound if others is None else float(others)
        )


DEFAULT_LIMITS = BindingLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One job with its plan, workers and agents."""

    now: datetime
    name: str
    uid: str
    generation: int
    """`metadata.generation`."""
    spec: ParallelTrainingJobSpec
    revision: str
    """Hash of the parts of the spec that need a restart when they change."""
    status: ParallelTrainingJobStatus
    plan: Plan
    workers: Sequence[Worker]
    other_plans: Sequence[Plan] = ()
    """Before the job starts: equally good plans with the same number of workers. Placement chooses one."""
    elastic: ParallelTrainingJobSpec | None = None
    """The spec of an elastic job. `spec` then has the number of replicas of `plan`. None for other jobs."""
    size_plans: Sequence[Plan] = ()
    """Of an elastic job: the plans of the sizes that it may have now, the largest first. Those for which it was planned
    anew come last. Empty while its size need not change."""
    full_plan: PlanStatus | None = None
    """Of an elastic job: the layout that it has with enough nodes. Its `data` is the wanted number with `gpus`."""
    taken_by: str = ""
    """Of an elastic job: the waiting job of higher priority for which it shrinks."""
    preempted_by: str = ""
    """The waiting job of higher priority for which this one has to stop."""
    admission: Admission | None = None
    """What the queue that the job names says. None for jobs of the operator's own queue."""
    joining: Sequence[Worker] = ()
    """Workers that start while the others train, to make the job larger."""
    excess_pods: Sequence[Pod] = ()
    """Live pods whose worker index is not in the plan."""
    stuck_pods: Sequence[Pod] = ()
    """Pods that do not terminate although their node is ready."""
    some_node_ready: bool = True
    """Whether any node of the cluster is ready. Otherwise the control plane may have lost its network."""
    namesakes: Sequence[Pod] = ()
    """Pods with the job's name that it does not own, such as those of a deleted job."""
    agents: Agents = field(default_factory=Agents)
    max_gpus: int | None = None
    """GPUs that the administrator's policy lets the job hold, also while it moves. None without a bound."""
    default_ttl: int | None = None
    """Seconds after which the administrator's policy deletes the job once it has finished, if its spec has no time."""
    binding: BindingLimits = DEFAULT_LIMITS
    """The operator's limits for other schedulers."""
    rejection: Rejection | None = None
    """The API server's rejection of the last attempt to create pods, if no decision has handled it yet."""

    own_workers: WorkersSpec | None = None
    """`spec.workers` of the job itself, if `spec` has more: what a profile adds, or the memory of copies."""
    profile: AppliedProfile | None = None
    """The administrator's profile for the job's pods."""
    checkpoint_request: str = ""
    """Value of the annotation that asks for a checkpoint. Empty without one."""
    devices: Mapping[str, int] = field(default_factory=dict)
    """What each pod claims through Dynamic Resource Allocation, by resource."""

    blocked_edit: BlockedEdit | None = None
    """If set, `spec` is the applied spec and not the object's, and this is the reason."""
    waiting_edit: WaitingEditStatus | None = None
    """The edit that waits because of `spec.updatePolicy`."""
    fallback: Observed | None = None
    """The job with its applied spec, if `spec` is an edit that would restart the gang."""
    found: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What `once` has found."""

    def once(self, question: object, find: Callable[[], T]) -> T:
        """What `find` returns, which several parts of a decision need. Nobody may change it.

        Args:
            question: What it is. The same question has the same answer.
            find: Called if nobody has asked before.
        """
        if question not in self.found:
            self.found[question] = find()
        answer: T = self.found[question]
        return answer

    @property
    def placed_spec(self) -> ParallelTrainingJobSpec:
        """The spec with what a queue requires of nodes, from which pods and requests for nodes are made."""
        admission = self.admission
        return self.spec if admission is None else self.once("placed spec", lambda: admission.placed(self.spec))

    @property
    def run(self) -> RunConfig:
        """What the ranks run. Only the ranks of a `NativeRun` report phases and steps."""
        return self.once("run", lambda: self.plan.run_config(self.spec))

    @property
    def mesh(self) -> MeshStatus:
        """The mesh generation in status."""
        return self.status.mesh or MeshStatus()

    @property
    def live_pods(self) -> list[Pod]:
        """All pods of the job that may still run."""
        current = [w.pod for w in self.workers if w.pod is not None and not w.pod.terminal]
        joining = [w.pod for w in self.joining if w.pod is not None and not w.pod.terminal]
        older = [pod for w in (*self.workers, *self.joining) for pod in w.older_pods]
        return [*current, *joining, *older, *self.excess_pods]

    def age(self, pod: Pod, unknown: float) -> float:
        """Seconds since the pod was created; `unknown` if its object has no creation time."""
        return (self.now - pod.created).total_seconds() if pod.created is not None else unknown

    def waiting_age(self, pod: Pod, unknown: float) -> float:
        """The same, but at most the time since it was bound, and since which the gang starts.

        Pods that others held, or that another scheduler had in its queue, did not start before.
        """
        since = [time for time in (parse_time(self.mesh.pending_since), pod.scheduled) if time is not None]
        ages = (max(0.0, (self.now - time).total_seconds()) for time in since)
        return min(self.age(pod, unknown), *ages) if since else self.age(pod, unknown)

    def audible_seconds(self, since: str | None) -> float:
        """Seconds since a time in status, but only those in which agents could hear this operator process."""
        return min(seconds_since(since, self.now), self.agents.listening_seconds)

    def reports_in(self, state: AgentState) -> dict[int, ReceivedReport]:
        """Worker index -> report, for reports with this state from the current generation and incarnation."""
        return self.once(("reports", state), lambda: self._reports_in(state))

    def _reports_in(self, state: AgentState) -> dict[int, ReceivedReport]:
        return {
            worker.index: received
            for worker in self.workers
            if (received := self.agents.reports.get(worker.index)) is not None
            and received.report.state is state
            and received.report.generation == self.mesh.generation
            and received.report.incarnation == worker.incarnation
        }


def has_started(status: ParallelTrainingJobStatus) -> bool:
    """Whether workers were ever placed. Before that, each reconcile may choose a better plan."""
    return status.placement is not None or (status.mesh is not None and status.mesh.generation > 0)


def observe_workers(
    indices: Iterable[int],
    status: ParallelTrainingJobStatus,
    pods: Sequence[Pod],
    down: Mapping[str, bool],
    rejecting: Mapping[str, str],
    draining: Mapping[str, str] | None = None,
    agents: Agents | None = None,
    now: datetime | None = None,
) -> tuple[list[Worker], list[Pod]]:
    """The workers with these indices in their current state, and live pods that belong to none of them.

    The incarnation of a worker is the highest in status or in any pod's name, so that a damaged status cannot reuse an
    earlier one.

    Args:
        indices: The workers of the job.
        status: The job's status.
        pods: The job's pods.
        down: Node -> whether it is not ready. A node that is missing here is gone.
        rejecting: Node -> why it does not accept pods of this job. A node that is missing here accepts them.
        draining: Node -> why it is draining.
        agents: The state of the job's agents.
        now: The current time. Without it, no pod counts as stuck.
    """
    stored = stored_workers(status.mesh)
    reported = completed_in_reports(status.mesh, agents or Agents())
    following = status.elastic.next_placement if status.elastic is not None else None
    entries = [*(following.workers if following else []), *(status.placement.workers if status.placement else [])]
    placed = {entry.worker: entry for entry in entries}
    by_worker: dict[int, list[Pod]] = {}
    for pod in pods:
        by_worker.setdefault(pod.worker, []).append(pod)
    workers = []
    for index in indices:
        worker_pods, entry = by_worker.pop(index, []), placed.get(index)
        incarnation = max([entry.incarnation if entry else -1, *(pod.incarnation for pod in worker_pods)])
        completed = index in stored or reported.get(index) == incarnation
        workers.append(
            _worker(
                index, incarnation, worker_pods, entry, down, rejecting, draining or {}, completed=completed, now=now
            )
        )
    excess_pods = [
        p for worker_pods in by_worker.values() for p in worker_pods if not p.terminal and not _lost(p, down, now)
    ]
    return workers, excess_pods


def _worker(
    index: int,
    incarnation: int,
    pods: Sequence[Pod],
    entry: WorkerPlacement | None,
    down: Mapping[str, bool],
    rejecting: Mapping[str, str],
    draining: Mapping[str, str],
    *,
    completed: bool,
    now: datetime | None,
) -> Worker:
    """One worker: its pods, its entry in the placement, and whether it is known to have completed the run."""
    current = next((pod for pod in pods if pod.incarnation == incarnation), None)
    node = current.node if current is not None and current.node else entry.node if entry else ""
    state = _state(current, down, now)
    older = [pod for pod in pods if pod.incarnation < incarnation]
    pinned = current is not None and bool(node) and not current.bound and not current.terminal
    rejection = "the node no longer exists" if node not in down else rejecting.get(node, "")
    return Worker(
        index=index,
        incarnation=incarnation,
        state=PodState.SUCCEEDED if completed and state in LOST_WITH_POD else state,
        pod=current,
        node=node,
        node_down=bool(node) and down.get(node, True),
        node_rejection=rejection if pinned else "",
        node_drain_reason=draining.get(node, "") if current is not None and current.bound else "",
        older_pods=tuple(pod for pod in older if not pod.terminal and not _lost(pod, down, now)),
        obsolete_pods=_obsolete(older),
        completed=completed or state is PodState.SUCCEEDED,
    )


def _lost(pod: Pod, down: Mapping[str, bool], now: datetime | None) -> bool:
    on_dead_node = pod.deleting and pod.bound and down.get(pod.node, True)
    return on_dead_node or (now is not None and is_stuck(pod, now))


def _obsolete(older_pods: Iterable[Pod]) -> tuple[Pod, ...]:
    """Ended pods that no one needs: all but the newest one whose container ran."""
    ended = sorted((pod for pod in older_pods if pod.terminal), key=lambda pod: pod.incarnation)
    last = next((pod for pod in reversed(ended) if not pod.rejection), None)
    return tuple(pod for pod in ended if pod is not last and not pod.deleting)


def _state(pod: Pod | None, down: Mapping[str, bool], now: datetime | None) -> PodState:
    if pod is None:
        return PodState.MISSING
    if pod.phase == "Succeeded":
        return PodState.SUCCEEDED
    if pod.phase == "Failed":
        return PodState.DISRUPTED if pod.disrupted else PodState.CRASHED
    if pod.deleting:
        return PodState.LOST if _lost(pod, down, now) else PodState.ENDING
    return PodState.RUNNING if pod.phase == "Running" else PodState.PENDING
