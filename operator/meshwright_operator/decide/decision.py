"""A decision in the making: the next status, and what to do once that status is written."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from meshwright.api.status import MeshStatus, ParallelTrainingJobStatus, RestartStatus
from meshwright_operator.decide import conditions, lifecycle, restart_policy
from meshwright_operator.decide.conditions import blocked_job_state
from meshwright_operator.decide.events import NORMAL, WARNING, JobEvent
from meshwright_operator.decide.gang import MapRanks, Place
from meshwright_operator.decide.observed import Observed
from meshwright_operator.decide.restart_policy import RestartCause
from meshwright_operator.kube.pod_info import Pod
from meshwright_operator.timestamps import format_time


@dataclass(slots=True)
class Decision:
    """What is to become of the job. Everything but `status` happens only after `status` is persisted."""

    observed: Observed
    status: ParallelTrainingJobStatus
    events: list[JobEvent] = field(default_factory=list)
    """Events to post."""
    delete: list[Pod] = field(default_factory=list)
    """Pods to delete."""
    ungate: list[Pod] = field(default_factory=list)
    """Pods whose gang gate comes off."""
    create: list[int] = field(default_factory=list)
    """Workers whose pods are to be made as `status.placement` says."""
    place: Place | None = None
    """Workers to find nodes for before `status` is written."""
    move: Place | None = None
    """Workers that are to leave their nodes if there is room for them elsewhere."""
    map_ranks: MapRanks | None = None
    """Nodes that another scheduler gave, to map ranks onto before `status` is written."""
    avoid: dict[str, str] = field(default_factory=dict)
    """Node -> why this job is not to be placed there for a while."""
    delete_job: bool = False
    requeue_after: float | None = None
    """Look again after so many seconds, whatever happens meanwhile."""

    @classmethod
    def of(cls, observed: Observed) -> Decision:
        """A draft that changes nothing yet."""
        status = observed.status.model_copy(deep=True)
        status.observed_generation = observed.generation
        return cls(observed, status)

    @property
    def mesh(self) -> MeshStatus:
        """`status.mesh`, made when it is not there."""
        if self.status.mesh is None:
            self.status.mesh = MeshStatus()
        return self.status.mesh

    def job_state(
        self, reason: str, message: str, *, ready: bool = False, stalled: bool = False, final: bool = False
    ) -> None:
        """Sets Ready, Reconciling and Stalled. Unless it is final, an edit that is held back is told with it."""
        found = conditions.JobState(reason, message, ready=ready, stalled=stalled)
        if self.observed.blocked_edit is not None and not final:
            found = blocked_job_state(self.observed.blocked_edit, self.observed.revision, found)
        conditions.set_job_state(self.status, found, self.observed.generation, self.observed.now)

    def starting(self, message: str, problem: str = "") -> None:
        """On its way to a generation; `problem` is the reason when something keeps it from getting there."""
        cause = self.mesh.pending_cause or self.mesh.cause
        first = not cause or not restart_policy.cause_named(cause).restarts
        text = message if first else f"{cause}: {message}"
        self.job_state(problem or ("Starting" if first else "Restarting"), text)

    def condition(self, kind: str, value: bool, reason: str, message: str = "") -> None:
        """Sets one other condition."""
        conditions.set_condition(
            self.status, kind, str(value), reason, message, self.observed.generation, self.observed.now
        )

    def add_event(self, reason: str, message: str, event_type: str = NORMAL) -> None:
        """Adds an event."""
        self.events.append(JobEvent(reason, message, event_type))

    def requeue_within(self, seconds: float | None) -> None:
        """Looks again after `seconds` at the latest."""
        if seconds is not None:
            self.requeue_after = seconds if self.requeue_after is None else min(self.requeue_after, seconds)

    def delete_live_pods(self) -> None:
        """Every pod that still runs and is not going yet is to go."""
        self.delete += [pod for pod in self.observed.live_pods if not pod.deleting]

    def add_cause_event(self, cause: RestartCause, message: str) -> None:
        """Adds the event of a cause."""
        self.add_event(cause.event or cause.name, message, cause.event_type)

    def count_restart(self, cause: RestartCause, codes: AbstractSet[int] = frozenset()) -> None:
        """Counts one restart, toward the limit too if its cause and its exit codes say so."""
        counts = {entry.cause: entry.count for entry in self.status.restarts}
        counts[cause.name] = counts.get(cause.name, 0) + 1
        self.status.restarts = [RestartStatus(cause=name, count=count) for name, count in counts.items()]
        self.status.restart_count += 1
        restart_policy.count_failure(self.status, self.observed.spec, cause, codes, self.observed.now)

    def over_limit(self) -> bool:
        """Whether one more restart that counts is more than `recovery.maxRestarts` allows."""
        return restart_policy.exhausted(self.status, self.observed.spec.recovery)

    def fail(self, reason: str, message: str) -> None:
        """The job has failed for good: its pods go and it stays as it is."""
        self.condition("Failed", True, reason, message)
        self.job_state(reason, message, stalled=True, final=True)
        self._finish()
        self.add_event("Failed", f"{reason}: {message}", WARNING)
        self.delete_live_pods()

    def complete(self, message: str) -> None:
        """The run is over and well."""
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
