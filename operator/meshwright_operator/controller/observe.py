"""Turns a raw job object into the input of a decision: spec, plan and workers. Raises if the job cannot run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import NamedTuple

from meshwright.api.labels import ANNOTATION_CHECKPOINT, MANAGER, MULTIKUEUE
from meshwright.api.objects import KubeObject
from meshwright.api.parsing import InvalidSpecError
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import ParallelTrainingJobStatus, PlanStatus
from meshwright.api.workers import WorkersSpec
from meshwright.planner.copies import with_copies_memory
from meshwright.planner.errors import PlanError
from meshwright.planner.plan import Plan
from meshwright.profiles.merged import with_extra_request, with_profile
from meshwright.rules.edits import with_later_fields, with_live_fields
from meshwright.rules.validation import check_edit
from meshwright_operator.controller.job_devices import JobDevices
from meshwright_operator.controller.job_profiles import JobProfiles
from meshwright_operator.controller.observe_sizes import SizePlans, plan_sizes
from meshwright_operator.controller.pod_deletions import PodDeletions
from meshwright_operator.decide import lifecycle
from meshwright_operator.decide.admission import Admission
from meshwright_operator.decide.agents import Agents
from meshwright_operator.decide.applied_spec import RunningSpec, revision_of, running_spec, spec_at_start
from meshwright_operator.decide.conditions import BlockedEdit
from meshwright_operator.decide.observed import (
    DEFAULT_LIMITS,
    BindingLimits,
    Observed,
    Rejection,
    has_started,
    observe_workers,
)
from meshwright_operator.decide.stuck_pods import stuck_pods
from meshwright_operator.decide.waiting_edit import edit_waits, waiting_edit
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.kube.pod_info import Pod
from meshwright_operator.planning.planner import Planner, PlanPendingError
from meshwright_operator.profiles.applied import AppliedProfile
from meshwright_operator.scheduling.scheduler import JobScheduler
from meshwright_operator.text import capitalized, with_warnings

PLANNING = "planning this job, or another one of its namespace, takes long, and continues in the background"


class JobRejectedError(Exception):
    """The job cannot run. If `retryable`, a change of the cluster may help; otherwise only an edit of the spec."""

    def __init__(self, reason: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retryable = retryable


@dataclass(frozen=True, slots=True)
class JobObserver:
    """Observes jobs, their pods and nodes, from the cache."""

    cache: Cache
    """The operator's view of the cluster."""
    scheduler: JobScheduler
    """Knows which nodes accept a job's pods."""
    planner: Planner
    """Has the plans."""
    binding: BindingLimits = DEFAULT_LIMITS
    """The operator's limits for other schedulers."""
    profiles: JobProfiles = field(default_factory=lambda: JobProfiles(lambda *job_and_text: ""))
    """The administrator's profiles."""
    devices: JobDevices | None = None
    """Knows what a job's pods claim; nothing if this is None."""
    deletions: PodDeletions = field(default_factory=PodDeletions)
    """Knows since when pods are being deleted."""

    def observe(
        self,
        key: JobKey,
        job: KubeObject,
        agents: Agents,
        now: datetime,
        rejection: Rejection | None = None,
        admission: Admission | None = None,
    ) -> Observed:
        """Observe one job.

        Args:
            key: The job's key.
            job: The job's object.
            agents: The state of the job's agents.
            now: The current time.
            rejection: The API server's rejection of the last attempt to create pods, if any.
            admission: What the queue that the job names says.

        Raises:
            JobRejectedError: The spec is invalid or no plan fits, and no earlier revision of the job is running.
            PlanPendingError: A plan is being made.
        """
        status = self.cache.parsed.status(job)
        observation = _Observation(self, key, job, status, agents, now, rejection, admission)
        running = running_spec(status)
        if running is None:
            spec = _parsed(job, self.cache)
            return observation.with_spec(*spec_at_start(job["spec"], status, spec))
        if lifecycle.finished(status):
            return observation.with_spec(_running_with_live_fields(running, job, self.cache), running.revision)
        try:
            requested = _parsed(job, self.cache)
        except JobRejectedError as error:
            spec = _running_with_live_fields(running, job, self.cache)
            return replace(observation.with_spec(spec, running.revision), blocked_edit=_blocked(error))
        if running.runs(job["spec"]):
            return _observe_deferred_edit(observation, running, requested)
        return _observe_edit(observation, running, requested)


def managed_here(job: KubeObject) -> bool:
    """Whether this operator manages the job, and not another manager (`spec.managedBy`)."""
    return _spec_field(job, "managedBy") in (None, MANAGER)


def sent_elsewhere(job: KubeObject) -> bool:
    """Whether MultiKueue sends the job to another cluster, whose operator runs it."""
    return _spec_field(job, "managedBy") == MULTIKUEUE


def suspended_by_user(job: KubeObject) -> bool:
    """Whether `spec.suspend` is true, even if the rest of the spec cannot be parsed."""
    return _spec_field(job, "suspend") is True


def _spec_field(job: KubeObject, field: str) -> object:
    spec = job.get("spec")
    return spec.get(field) if isinstance(spec, dict) else None


class _Planned(NamedTuple):
    """What a job's pods are made from; see `Observed`."""

    spec: ParallelTrainingJobSpec
    plan: Plan
    others: list[Plan]
    elastic: ParallelTrainingJobSpec | None
    sizes: list[Plan]
    full: PlanStatus | None
    taken_by: str
    preempted_by: str
    own_workers: WorkersSpec
    profile: AppliedProfile | None
    devices: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Observation:
    """Observes one job at one moment, with a spec that is given: that of its object, or the applied one."""

    by: JobObserver
    key: JobKey
    job: KubeObject
    status: ParallelTrainingJobStatus
    agents: Agents
    now: datetime
    rejection: Rejection | None
    admission: Admission | None

    def with_spec(self, spec: ParallelTrainingJobSpec, revision: str) -> Observed:
        """The job with this spec, whose revision is `revision`.

        Raises:
            JobRejectedError: No plan fits the spec.
            PlanPendingError: The plan is being made.
        """
        uid = self.job["metadata"]["uid"]
        pods = self.by.deletions.as_seen(self.by.cache.pods(self.key, uid), self.now)
        made = self._planned(spec, revision, pods)
        plan, spec = made.plan, made.spec
        down = _down_nodes(self.status, pods, self.by.cache)
        rejecting, draining = _rejecting_nodes(self._placed(spec), pods, self.by.cache, self.by.scheduler)
        indices, joining = _workers(plan, self.status, revision, elastic=made.elastic is not None)
        workers, excess_pods = observe_workers(
            [*indices, *joining], self.status, pods, down, rejecting, draining, self.agents, self.now
        )
        return Observed(
            now=self.now,
            name=self.key.name,
            uid=uid,
            generation=int(self.job["metadata"].get("generation", 0)),
            spec=spec,
            revision=revision,
            status=self.status,
            plan=plan,
            workers=workers[: len(indices)],
            other_plans=made.others,
            elastic=made.elastic,
            size_plans=made.sizes,
            full_plan=made.full,
            taken_by=made.taken_by,
            preempted_by=made.preempted_by,
            joining=workers[len(indices) :],
            excess_pods=excess_pods,
            stuck_pods=stuck_pods(pods, down, self.now),
            some_node_ready=not all(down.values()) or any(map(_is_ready, self.by.cache.nodes.values())),
            namesakes=self.by.cache.namesakes(self.key, uid),
            agents=self.agents,
            rejection=self.rejection,
            binding=self.by.binding,
            admission=self.admission,
            checkpoint_request=(self.job["metadata"].get("annotations") or {}).get(ANNOTATION_CHECKPOINT, ""),
            own_workers=made.own_workers if made.profile is not None or plan.copies_bytes else None,
            profile=made.profile,
            devices=made.devices,
        )

    def _planned(self, spec: ParallelTrainingJobSpec, revision: str, pods: Sequence[Pod]) -> _Planned:
        """The job's plans, with what its profile, its devices and the copies of its ranks' state add to its pods."""
        if self.by.devices is not None:
            spec = self.by.devices.joined(self.key.namespace, spec)
        own_workers, profile = spec.workers, self._profile(spec, revision)
        if profile is not None:
            spec = with_profile(spec, profile.profile)
        elastic = spec if spec.elastic is not None else None
        limit = self.by.scheduler.replica_limit(self.job["metadata"]["uid"])
        preempted_by = str(limit[1]) if limit is not None and not limit[0] else ""
        taken_by, sizes, full = "", list[Plan](), None
        if elastic is None:
            plan, *others = _plans(self.key, spec, self.status, revision, self.by.planner)
        else:
            limit = None if preempted_by else limit
            found = self._elastic_plans(spec, revision, pods, limit)
            taken_by = str(limit[1]) if limit is not None else ""
            spec, others, full = found.spec, [], found.full
            plan, sizes = found.plan.with_copies(elastic), [size.with_copies(elastic) for size in found.sizes]
            elastic = with_copies_memory(elastic, plan.copies_bytes)
        spec = with_copies_memory(spec, plan.copies_bytes)
        devices = self.by.devices.requests(self.key.namespace, spec) if self.by.devices is not None else {}
        if profile is not None or devices:
            extended = partial(with_extra_request, spec, profile.profile if profile is not None else None, devices)
            plan, others, sizes = extended(plan), list(map(extended, others)), list(map(extended, sizes))
        return _Planned(spec, plan, others, elastic, sizes, full, taken_by, preempted_by, own_workers, profile, devices)

    def _elastic_plans(
        self, spec: ParallelTrainingJobSpec, revision: str, pods: Sequence[Pod], limit: tuple[int, JobKey] | None
    ) -> SizePlans:
        """The plans of the sizes that an elastic job may have."""
        left = sum(not pod.terminal and not pod.deleting for pod in pods) * spec.workers.gpus_per_worker
        drains = bool(_rejecting_nodes(self._placed(spec), pods, self.by.cache, self.by.scheduler)[1])
        allowed = self._replicas(limit)
        return _size_plans(self.key, spec, self.status, revision, self.by.planner, allowed, left, drains=drains)

    def _placed(self, spec: ParallelTrainingJobSpec) -> ParallelTrainingJobSpec:
        """The spec with what the queue requires of nodes."""
        return spec if self.admission is None else self.admission.placed(spec)

    def _replicas(self, limit: tuple[int, JobKey] | None) -> int | None:
        """The number of replicas that waiting jobs and the queue leave to an elastic job."""
        admitted = self.admission.replicas if self.admission is not None else None
        left = [number for number in (limit[0] if limit is not None else None, admitted) if number is not None]
        return min(left, default=None)

    def _profile(self, spec: ParallelTrainingJobSpec, revision: str) -> AppliedProfile | None:
        """The profile for the pods of this revision.

        Raises:
            JobRejectedError: The job needs pods, and the administrator does not allow the profile, or the job
                contradicts it.
        """
        if spec.workers.profile is None:
            return None
        has_pods = any(not pod.terminal for pod in self.by.cache.pods(self.key, self.job["metadata"]["uid"]))
        found = self.by.profiles.choose(self.key, self.job, spec, revision, self.status, has_pods=has_pods)
        if not isinstance(found, Rejection):
            return found
        if lifecycle.finished(self.status) or spec.suspend:
            return None  # it gets no pods
        raise JobRejectedError(found.reason, found.message)


def _parsed(job: KubeObject, cache: Cache) -> ParallelTrainingJobSpec:
    try:
        return cache.parsed.spec(job)
    except InvalidSpecError as error:
        raise JobRejectedError("InvalidSpec", str(error)) from None


def _observe_edit(observation: _Observation, running: RunningSpec, requested: ParallelTrainingJobSpec) -> Observed:
    """A started job whose edit needs a restart: with the edit, or with its applied spec if the edit is not valid."""
    as_running = observation.with_spec(with_live_fields(running.spec, requested), running.revision)
    forbidden = check_edit(running.spec, requested) if _has_trained(running.spec, observation) else []
    if forbidden:
        text = "; ".join(f"spec.{p.field}: {p.message}" for p in forbidden)
        return replace(as_running, blocked_edit=BlockedEdit("ImmutableField", text, retryable=False))
    if not as_running.mesh.pending_cause and lifecycle.all_completed(as_running):
        return as_running  # as after the end, which comes when its pods have exited
    try:
        edited = replace(observation.with_spec(requested, revision_of(requested)), fallback=as_running)
        waiting = waiting_edit(as_running, edited)
        return (
            edited if waiting is None else replace(as_running, waiting_edit=waiting, blocked_edit=edit_waits(waiting))
        )
    except JobRejectedError as error:
        return replace(as_running, blocked_edit=_blocked(error))
    except PlanPendingError as pending:
        if not pending.slow:
            raise
        # The running revision must not be left alone meanwhile.
        return replace(as_running, blocked_edit=_blocked(JobRejectedError("Planning", PLANNING, retryable=True)))


def _has_trained(running: ParallelTrainingJobSpec, observation: _Observation) -> bool:
    """Whether a step is finished, by status or by a report that is newer. A command reports none, so it counts as
    such.
    """
    status = observation.status
    reported = any(received.report.progress is not None for received in observation.agents.reports.values())
    return running.runtime.command is not None or status.checkpoint is not None or bool(status.step) or reported


def _observe_deferred_edit(
    observation: _Observation, running: RunningSpec, requested: ParallelTrainingJobSpec
) -> Observed:
    """A started job whose edit takes effect at the next start of its ranks. Blocked if the ranks would reject it."""
    # Only these fields of the request: the others are equal, or a later version of the CRD added them.
    edited = with_later_fields(running.spec, requested)
    seen = observation.with_spec(edited, running.revision)
    if edited == running.spec:
        return seen
    problems = seen.plan.problems(edited)
    if not problems or seen.plan.problems(running.spec):
        return seen
    as_running = observation.with_spec(with_live_fields(running.spec, requested), running.revision)
    return replace(as_running, blocked_edit=_blocked(JobRejectedError("InvalidSpec", "; ".join(problems))))


def _blocked(error: JobRejectedError) -> BlockedEdit:
    return BlockedEdit(error.reason, f"The edit cannot be applied: {error.message}", retryable=error.retryable)


def _running_with_live_fields(running: RunningSpec, job: KubeObject, cache: Cache) -> ParallelTrainingJobSpec:
    """The applied spec with the object's values of the fields that take effect at once, if they can be parsed."""
    try:
        return with_live_fields(running.spec, cache.parsed.spec(job))
    except InvalidSpecError:
        return running.spec.model_copy(update={"suspend": suspended_by_user(job)})


def _plans(
    key: JobKey, spec: ParallelTrainingJobSpec, status: ParallelTrainingJobStatus, revision: str, planner: Planner
) -> list[Plan]:
    """The running plan. If no plan of this revision is running, the plans to choose from, the best first."""
    same = status.plan is not None and status.plan.revision in ("", revision)
    running_plan = status.plan if same and has_started(status) else None
    try:
        if running_plan is not None:
            return [planner.running_plan(key, spec, running_plan)]
        return planner.plans(key, spec)
    except PlanError as error:
        depends_on_nodes = error.depends_on_cluster and running_plan is None
        raise _unplannable(error, spec, planner, depends_on_nodes=depends_on_nodes) from None


def _size_plans(
    key: JobKey,
    spec: ParallelTrainingJobSpec,
    status: ParallelTrainingJobStatus,
    revision: str,
    planner: Planner,
    replicas: int | None,
    gpus_left: int,
    *,
    drains: bool,
) -> SizePlans:
    try:
        return plan_sizes(key, spec, status, revision, planner, replicas, gpus_left, drains=drains)
    except PlanError as error:
        raise _unplannable(error, spec, planner, depends_on_nodes=error.depends_on_cluster) from None


def _unplannable(
    error: PlanError, spec: ParallelTrainingJobSpec, planner: Planner, *, depends_on_nodes: bool
) -> JobRejectedError:
    """The error, with problems of nodes if these may be the reason."""
    message = with_warnings(capitalized(str(error)), planner.warnings(spec) if depends_on_nodes else ())
    return JobRejectedError(error.reason, message, retryable=error.depends_on_cluster)


def _workers(
    plan: Plan, status: ParallelTrainingJobStatus, revision: str, *, elastic: bool
) -> tuple[Sequence[int], Sequence[int]]:
    """The indices of the job's workers, and of those that join it. Resizes leave gaps in an elastic job's indices."""
    same = status.plan is not None and status.plan.revision in ("", revision)
    placed = [entry.worker for entry in status.placement.workers] if status.placement is not None else []
    if not elastic or not same or len(placed) != len(plan.workers):
        return range(len(plan.workers)), ()
    following = status.elastic.next_placement if status.elastic is not None else None
    after = [entry.worker for entry in following.workers] if following is not None else []
    return placed, [index for index in after if index not in placed]


def _down_nodes(status: ParallelTrainingJobStatus, pods: Sequence[Pod], cache: Cache) -> dict[str, bool]:
    """Node -> whether it is not ready, of the nodes that the job uses. A node that is missing is gone."""
    following = status.elastic.next_placement if status.elastic is not None else None
    placements = [placement for placement in (following, status.placement) if placement is not None]
    named = {entry.node for placement in placements for entry in placement.workers}
    return {name: not _is_ready(cache.nodes[name]) for name in named | {p.node for p in pods} if name in cache.nodes}


def _rejecting_nodes(
    spec: ParallelTrainingJobSpec, pods: Sequence[Pod], cache: Cache, scheduler: JobScheduler
) -> tuple[Mapping[str, str], dict[str, str]]:
    """Node -> why it does not accept the job's pods, and node -> why it is draining."""
    unbound = [pod.node for pod in pods if not pod.bound and not pod.terminal]
    bound = [pod.node for pod in pods if pod.bound and _may_be_draining(cache.nodes.get(pod.node))]
    rejecting = scheduler.unusable_nodes(spec, [*unbound, *bound]) if unbound or bound else {}
    return rejecting, {name: why for name in bound if _is_draining(why := rejecting.get(name, ""))}


def _may_be_draining(node: KubeObject | None) -> bool:
    """Whether the node is unschedulable or has taints. Few nodes have, and only their inventory is read."""
    return node is not None and bool(node["spec"].get("unschedulable") or node["spec"].get("taints"))


def _is_draining(rejection: str) -> bool:
    """Whether a node that rejects pods for this reason is draining.

    Taints that Kubernetes adds for a node's condition (memory or disk pressure, not ready) are temporary and do not
    count.
    """
    return rejection == "cordoned" or (
        rejection.startswith("taint ") and not rejection.startswith("taint node.kubernetes.io/")
    )


def _is_ready(node: KubeObject) -> bool:
    return any(c.get("status") == "True" for c in node["status"]["conditions"])
