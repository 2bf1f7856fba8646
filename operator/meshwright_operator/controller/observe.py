"""From a raw job object to what decisions need: spec, plan and observed workers, or why that is impossible."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache

from meshwright.api.edits import with_live_fields
from meshwright.api.labels import MANAGER
from meshwright.api.objects import KubeObject
from meshwright.api.parsing import InvalidSpecError, parse_spec, parse_status
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import ParallelTrainingJobStatus, PlanStatus
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.errors import PlanError
from meshwright.planner.plan import Plan, make_plan
from meshwright.rules.validation import check_edit
from meshwright_operator.decide import lifecycle
from meshwright_operator.decide.agents import Agents
from meshwright_operator.decide.applied_spec import revision_of, running_spec
from meshwright_operator.decide.conditions import BlockedEdit
from meshwright_operator.decide.observed import Observed, Rejection, Worker, has_started, observe_workers
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.kube.pod_info import Pod
from meshwright_operator.scheduling.scheduler import JobScheduler
from meshwright_operator.text import with_warnings

log = logging.getLogger(__name__)

NO_NODES = Inventory()


class JobRejectedError(Exception):
    """The job cannot be acted on. `retryable`: another cluster could help; else only another spec can."""

    def __init__(self, reason: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retryable = retryable


def observe_job(
    key: JobKey,
    job: KubeObject,
    cache: Cache,
    scheduler: JobScheduler,
    agents: Agents,
    now: datetime,
    rejection: Rejection | None = None,
) -> Observed:
    """One job and all that belongs to it, as the cache has it; `rejection` is what its last pods met.

    Raises:
        RefusedError: the spec is invalid or cannot be planned, and nothing runs that could go on without it.
    """
    status = parse_status(job)
    observer = _JobObserver(key, job, status, cache, scheduler, agents, now, rejection)
    running = running_spec(status)
    if running is None:
        return observer.observe_as(_parsed(job))
    if lifecycle.finished(status):
        return observer.observe_as(_running_with_live_fields(running, job))
    try:
        requested = _parsed(job)
    except JobRejectedError as error:
        return replace(observer.observe_as(_running_with_live_fields(running, job)), blocked_edit=_blocked(error))
    if revision_of(requested) == revision_of(running):
        return _observe_deferred_edit(observer, running, requested)
    return _observe_edit(observer, running, requested)


def managed_here(job: KubeObject) -> bool:
    """Whether this operator is the one to act on the job; another manager's job is none of its business."""
    return _spec_field(job, "managedBy") in (None, MANAGER)


def suspended_by_user(job: KubeObject) -> bool:
    """Whether the object asks for suspension, however little else of it can be read."""
    return _spec_field(job, "suspend") is True


def _spec_field(job: KubeObject, field: str) -> object:
    spec = job.get("spec")
    return spec.get(field) if isinstance(spec, dict) else None


@dataclass(frozen=True, slots=True)
class _JobObserver:
    """One look at a job, at whatever spec it is taken to have."""

    key: JobKey
    job: KubeObject
    status: ParallelTrainingJobStatus
    cache: Cache
    scheduler: JobScheduler
    agents: Agents
    now: datetime
    rejection: Rejection | None

    def observe_as(self, spec: ParallelTrainingJobSpec) -> Observed:
        """The job if `spec` is what it is to run. Raises RefusedError where that cannot be planned."""
        metadata = self.job["metadata"]
        revision = revision_of(spec)
        plan, *others = _plans(spec, self.status, revision, self.scheduler)
        pods = self.cache.pods(self.key, metadata["uid"])
        workers, excess_pods = _workers(spec, plan, self.status, pods, self.cache, self.scheduler)
        return Observed(
            now=self.now,
            name=self.key.name,
            uid=metadata["uid"],
            generation=int(metadata.get("generation", 0)),
            spec=spec,
            revision=revision,
            status=self.status,
            plan=plan,
            workers=workers,
            other_plans=others,
            excess_pods=excess_pods,
            agents=self.agents,
            rejection=self.rejection,
        )


def _parsed(job: KubeObject) -> ParallelTrainingJobSpec:
    try:
        return parse_spec(job)
    except InvalidSpecError as error:
        raise JobRejectedError("InvalidSpec", str(error)) from None


def _observe_edit(
    observer: _JobObserver, running: ParallelTrainingJobSpec, requested: ParallelTrainingJobSpec
) -> Observed:
    """A started job whose spec is another one than runs: with the edit, or as it runs when that cannot be."""
    as_running = observer.observe_as(with_live_fields(running, requested))
    forbidden = check_edit(running, requested)
    if forbidden:
        text = "; ".join(f"spec.{p.field}: {p.message}" for p in forbidden)
        return replace(as_running, blocked_edit=BlockedEdit("ImmutableField", text, retryable=False))
    try:
        return replace(observer.observe_as(requested), fallback=as_running)
    except JobRejectedError as error:
        return replace(as_running, blocked_edit=_blocked(error))


def _observe_deferred_edit(
    observer: _JobObserver, running: ParallelTrainingJobSpec, requested: ParallelTrainingJobSpec
) -> Observed:
    """A started job whose gang stays: what ranks are told when they start next is held back where they refuse it."""
    seen = observer.observe_as(requested)
    if requested == running:
        return seen
    problems = seen.plan.problems(requested)
    if not problems or seen.plan.problems(running):
        return seen
    as_running = observer.observe_as(with_live_fields(running, requested))
    return replace(as_running, blocked_edit=_blocked(JobRejectedError("InvalidSpec", "; ".join(problems))))


def _blocked(error: JobRejectedError) -> BlockedEdit:
    return BlockedEdit(error.reason, f"the edit cannot be put into effect: {error.message}", retryable=error.retryable)


def _running_with_live_fields(running: ParallelTrainingJobSpec, job: KubeObject) -> ParallelTrainingJobSpec:
    """What runs, with the fields that take effect at once as the object has them, as far as they can be read."""
    try:
        return with_live_fields(running, parse_spec(job))
    except InvalidSpecError:
        return running.model_copy(update={"suspend": suspended_by_user(job)})


def _plans(
    spec: ParallelTrainingJobSpec, status: ParallelTrainingJobStatus, revision: str, scheduler: JobScheduler
) -> list[Plan]:
    """The plan that runs; where none does for this revision of the spec, those to choose from, the best first."""
    same = status.plan is not None and status.plan.revision in ("", revision)
    running_plan = status.plan if same and has_started(status) else None
    try:
        if running_plan is not None:
            return [_running(spec.model_dump_json(), running_plan.model_dump_json())]
        return scheduler.plans(spec)
    except PlanError as error:
        depends_on_nodes = error.depends_on_cluster and running_plan is None
        node_warnings = scheduler.inventory(spec).warnings if depends_on_nodes else ()
        raise JobRejectedError(
            error.reason, with_warnings(str(error), node_warnings), retryable=error.depends_on_cluster
        ) from None
    except (ValueError, ArithmeticError, LookupError, TypeError) as error:
        # A fault of the planner's: the owner is told, and what runs goes on.
        log.exception("the planner failed")
        raise JobRejectedError("PlannerFailed", f"no plan was made: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=4096)
def _running(spec: str, running_plan: str) -> Plan:
    """The plan of a job that runs, both as JSON: nodes do not change it, so it is made once, not at every look."""
    return make_plan(
        ParallelTrainingJobSpec.model_validate_json(spec), NO_NODES, PlanStatus.model_validate_json(running_plan)
    )


def _workers(
    spec: ParallelTrainingJobSpec,
    plan: Plan,
    status: ParallelTrainingJobStatus,
    pods: Sequence[Pod],
    cache: Cache,
    scheduler: JobScheduler,
) -> tuple[list[Worker], list[Pod]]:
    named = {entry.node for entry in (status.placement.workers if status.placement else [])}
    down = {name: not _is_ready(cache.nodes[name]) for name in named | {p.node for p in pods} if name in cache.nodes}
    unbound = [pod.node for pod in pods if not pod.bound and not pod.terminal]
    bound = [pod.node for pod in pods if pod.bound and _may_be_draining(cache.nodes.get(pod.node))]
    refused = scheduler.unusable_nodes(spec, [*unbound, *bound]) if unbound or bound else {}
    draining = {name: why for name in bound if _is_draining(why := refused.get(name, ""))}
    return observe_workers(len(plan.workers), status, pods, down, refused, draining)


def _may_be_draining(node: KubeObject | None) -> bool:
    """Whether anything about the node keeps pods off: few nodes, so that no others need to be read."""
    return node is not None and bool(node["spec"].get("unschedulable") or node["spec"].get("taints"))


def _is_draining(rejection: str) -> bool:
    """Whether a node that refuses pods for this reason is about to be emptied.

    Taints of the node's own condition (memory or disk pressure, not ready) come and go; that is no plan to empty it.
    """
    return rejection == "cordoned" or (
        rejection.startswith("taint ") and not rejection.startswith("taint node.kubernetes.io/")
    )


def _is_ready(node: KubeObject) -> bool:
    return any(c.get("status") == "True" for c in node["status"]["conditions"])
