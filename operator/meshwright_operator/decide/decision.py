"""A decision: the job's next status, and what to do once that status is written."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from meshwright.api.status import (
    MAX_RESTART_CAUSES,
    MeshStatus,
    ParallelTrainingJobStatus,
    RestartStatus,
    added,
)
from meshwright_operator.decide import conditions, lifecycle, restart_policy
from meshwright_operator.decide.conditions import blocked_job_state
from meshwright_operator.decide.gang_actions import MapRanks, Place
from meshwright_operator.decide.observed import Observed
from meshwright_operator.decide.restart_policy import RestartCause
from meshwright_operator.kube.job_event import NORMAL, WARNING, JobEvent
from meshwright_operator.kube.pod_info import Pod
from meshwright_operator.timestamps import format_time


@dataclass(slots=True)
class Decision:
    """The job's next status, and the actions to do after that status is persisted."""

    observed: Observed
    status: ParallelTrainingJobStatus
    events: list[JobEvent] = field(default_factory=list)
    """Events to post."""
    delete: list[Pod] = field(default_factory=list)
    """Pods to delete."""
    ungate: list[Pod] = field(default_factory=list)
    """Pods whose scheduling gate to remove."""
    create: list[int] = field(default_factory=list)
    """Workers whose pods to create, on the nodes in `status.placement`."""
    place: Place | None = None
    """Workers that need nodes before `status` is written."""
    move: Place | None = None
    """Workers to move to other nodes, if they fit there."""
    grow: Place | None = None
    """Sizes to which a job that trains may grow, if they fit."""
    map_ranks: MapRanks | None = None
    """Nodes that another scheduler chose, to map ranks onto before `status` is written."""
    avoid: dict[str, str] = field(default_factory=dict)
    """Node -> why not to place this job there for a while."""
    avoid_seconds: float | None = None
    """For how long; None for the scheduler's default."""
    blocked_nodes: dict[str, str] = field(default_factory=dict)
    """Node -> why this job must not be placed there, as long as the decision says so."""
    detection_seconds: float = 0.0
    """If this decision ended a generation that failed: seconds from the first symptom to the verdict."""
    delete_job: bool = False
    requeue_after: float | None = None
    """Seconds after which to reconcile the job again, even without an event."""

    @classmethod
    def of(cls, observed: Observed) -> Decision:
        """A decision that changes nothing yet."""
        # A placement is replaced and never changed. With many workers, its copy would take longer than the decision.
        placement = observed.status.placement
        status = observed.status.model_copy(update={"placement": None}).separate()
        status.placement = placement
        status.observed_generation = observed.generation
        return cls(observed, status)

    @property
    def mesh(self) -> MeshStatus:
        """`status.mesh`, created if it is missing."""
        if self.status.mesh is None:
            self.status.mesh = MeshStatus()
        return self.status.mesh

    def job_state(
        self,
        reason: str,
        message: str,
        *,
        ready: bool = False,
        stalled: bool = False,
        unknown: bool = False,
        final: bool = False,
    ) -> None:
        """Sets Ready, Reconciling and Stalled. Unless the state is final, they also report a blocked edit."""
        state = conditions.JobState(reason, message, ready=ready, stalled=stalled, unknown=unknown)
        if self.observed.blocked_edit is not None and not final:
            state = blocked_job_state(self.observed.blocked_edit, self.observed.revision, state)
        conditions.set_job_state(self.status, state, self.observed.generation, self.observed.now)

    def starting(self, message: str, problem: str = "") -> None:
        """Sets the state of a job without a running generation. `problem` is the reason if something prevents one."""
        cause = self.mesh.pending_cause or self.mesh.cause
        first = not cause or not restart_policy.cause_named(cause).restarts
        text = message if first else f"{cause}: {message}"
        self.job_state(problem or ("Starting" if first else "Restarting"), text)

    def condition(self, kind: str, value: bool, reason: str, message: str = "") -> None:
        """Sets one other condition."""
        conditions.set_condition(
            self.status, kind, str(value), reason, message, self.observed.generation, self.observed.now
        )

    def unknown_condition(self, kind: str, reason: str, message: str) -> None:
        """Sets one other condition to Unknown."""
        conditions.set_condition(
            self.status, kind, "Unknown", reason, message, self.observed.generation, self.observed.now
        )

    def add_event(self, reason: str, message: str, event_type: str = NORMAL) -> None:
        """Adds an event."""
        self.events.append(JobEvent(reason, message, event_type))

    def requeue_within(self, seconds: float | None) -> None:
        """Reconciles the job again after `seconds` at the latest."""
        if seconds is not None:
            self.requeue_after = seconds if self.requeue_after is None else min(self.requeue_after, seconds)

    def delete_live_pods(self) -> None:
        """Deletes every live pod that is not being deleted yet."""
        self.delete += [pod for pod in self.observed.live_pods if not pod.deleting and pod not in self.delete]

    def add_cause_event(self, cause: RestartCause, message: str) -> None:
        """Adds the event of a cause."""
        self.add_event(cause.event or cause.name, message, cause.event_type)

    def count_restart(self, cause: RestartCause, codes: AbstractSet[int] = frozenset()) -> None:
        """Counts one restart, and counts it toward the limit if its cause and exit codes do."""
        counts = {entry.cause: entry.count for entry in self.status.restarts}
        counts[cause.name] = added(counts.get(cause.name, 0))
        others = [name for name in counts if name != cause.name]
        kept = {cause.name, *others[: MAX_RESTART_CAUSES - 1]}
        self.status.restarts = [
            RestartStatus(cause=name, count=count) for name, count in counts.items() if name in kept
        ]
        self.status.restart_count = added(self.status.restart_count)
        restart_policy.count_failure(self.status, self.observed.spec, cause, codes, self.observed.now)

    def over_limit(self) -> bool:
        """Whether one more restart that counts would exceed `recovery.maxRestarts`."""
        return restart_policy.exhausted(self.status, self.observed.spec.recovery)

    def fail(self, reason: str, message: str) -> None:
        """Fails the job for good, and deletes its pods."""
        self.condition("Failed", True, reason, message)
        self.job_state(reason, message, stalled=True, final=True)
        self._finish()
        self.add_event("Failed", f"{reason}: {message}", WARNING)
        self.delete_live_pods()

    def complete(self, message: str) -> None:
        """Completes the job, and deletes its pods."""
        self.condition("Complete", True, "Completed", message)
        self.job_state("Completed", message, ready=True, final=True)
        self._finish()
        self.add_event("Completed", message)
        self.delete_live_pods()

    def _finish(self) -> None:
        lifecycle.pause(self.status, self.observed.now)
        self.status.completion_time = format_time(self.observed.now)
        self.status.ready_ranks = f"0/{self.observed.plan.layout.world_size}"
        self.status.tokens_per_second = self.status.eta_seconds = None
        if self.status.mesh is not None:
            self.mesh.pending_cause = ""
            self.mesh.pending_since = None
            self.mesh.succeeded_workers = ""
            self.mesh.completed_time = None
