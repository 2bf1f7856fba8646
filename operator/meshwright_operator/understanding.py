"""From a raw job object to what decisions need: spec, plan and observed workers, or why that is impossible."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache

from meshwright.api.edits import with_live_fields
from meshwright.api.job import InvalidSpecError, parse_spec, parse_status
from meshwright.api.labels import MANAGER
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import ParallelTrainingJobStatus, PlanStatus
from meshwright.api.validation import check_edit
from meshwright.planner.errors import PlanError
from meshwright.planner.inventory import Inventory
from meshwright.planner.plan import Plan, make_plan, make_plans
from meshwright_operator.cache import Cache, JobKey, Object
from meshwright_operator.coordinator.board import Agents
from meshwright_operator.decide import lifecycle
from meshwright_operator.decide.applied import running_spec
from meshwright_operator.decide.held import Held
from meshwright_operator.decide.observed import Observed, Refusal, Worker, has_started, observe_workers
from meshwright_operator.decide.revision import revision_of
from meshwright_operator.placing import Placer
from meshwright_operator.pods import Pod
from meshwright_operator.words import with_remarks

log = logging.getLogger(__name__)

NO_NODES = Inventory()


class RefusedError(Exception):
    """The job cannot be acted on. `waits`: another cluster could help; else only another spec can."""

    def __init__(self, reason: str, message: str, *, waits: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.waits = waits


def understand(
    key: JobKey,
    job: Object,
    cache: Cache,
    placer: Placer,
    agents: Agents,
    now: datetime,
    refusal: Refusal | None = None,
) -> Observed:
    """One job and all that belongs to it, as the cache has it; `refusal` is what its last pods met.

    Raises:
        RefusedError: the spec is invalid or cannot be planned, and nothing runs that could go on without it.
    """
    status = parse_status(job)
    look = _Look(key, job, status, cache, placer, agents, now, refusal)
    running = running_spec(status)
    if running is None:
        return look.at(_parsed(job))
    if lifecycle.finished(status):
        return look.at(_while_invalid(running, job))
    try:
        wanted = _parsed(job)
    except RefusedError as error:
        return replace(look.at(_while_invalid(running, job)), held=_held(error))
    if revision_of(wanted) == revision_of(running):
        return _told_later(look, running, wanted)
    return _edited(look, running, wanted)


def managed_here(job: Object) -> bool:
    """Whether this operator is the one to act on the job; another manager's job is none of its business."""
    return _stated(job, "managedBy") in (None, MANAGER)


def suspended_by_user(job: Object) -> bool:
    """Whether the object asks for suspension, however little else of it can be read."""
    return _stated(job, "suspend") is True


def _stated(job: Object, field: str) -> object:
    spec = job.get("spec")
    return spec.get(field) if isinstance(spec, dict) else None


@dataclass(frozen=True, slots=True)
class _Look:
    """One look at a job, at whatever spec it is taken to have."""

    key: JobKey
    job: Object
    status: ParallelTrainingJobStatus
    cache: Cache
    placer: Placer
    agents: Agents
    now: datetime
    refusal: Refusal | None

    def at(self, spec: ParallelTrainingJobSpec) -> Observed:
        """The job if `spec` is what it is to run. Raises RefusedError where that cannot be planned."""
        metadata = self.job["metadata"]
        revision = revision_of(spec)
        plan, *others = _plans(spec, self.status, revision, self.placer)
        pods = self.cache.pods(self.key, metadata["uid"])
        workers, strays = _workers(spec, plan, self.status, pods, self.cache, self.placer)
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
            strays=strays,
            agents=self.agents,
            refusal=self.refusal,
        )


def _parsed(job: Object) -> ParallelTrainingJobSpec:
    try:
        return parse_spec(job)
    except InvalidSpecError as error:
        raise RefusedError("InvalidSpec", str(error)) from None


def _edited(look: _Look, running: ParallelTrainingJobSpec, wanted: ParallelTrainingJobSpec) -> Observed:
    """A started job whose spec is another one than runs: with the edit, or as it runs when that cannot be."""
    as_it_runs = look.at(with_live_fields(running, wanted))
    forbidden = check_edit(running, wanted)
    if forbidden:
        text = "; ".join(f"spec.{p.field}: {p.message}" for p in forbidden)
        return replace(as_it_runs, held=Held("ImmutableField", text, waits=False))
    try:
        return replace(look.at(wanted), fallback=as_it_runs)
    except RefusedError as error:
        return replace(as_it_runs, held=_held(error))


def _told_later(look: _Look, running: ParallelTrainingJobSpec, wanted: ParallelTrainingJobSpec) -> Observed:
    """A started job whose gang stays: what ranks are told when they start next is held back where they refuse it."""
    seen = look.at(wanted)
    if wanted == running:
        return seen
    problems = seen.plan.problems(wanted)
    if not problems or seen.plan.problems(running):
        return seen
    as_it_runs = look.at(with_live_fields(running, wanted))
    return replace(as_it_runs, held=_held(RefusedError("InvalidSpec", "; ".join(problems))))


def _held(error: RefusedError) -> Held:
    return Held(error.reason, f"the edit cannot be put into effect: {error.message}", waits=error.waits)


def _while_invalid(running: ParallelTrainingJobSpec, job: Object) -> ParallelTrainingJobSpec:
    """What runs, with the fields that take effect at once as the object has them, as far as they can be read."""
    try:
        return with_live_fields(running, parse_spec(job))
    except InvalidSpecError:
        return running.model_copy(update={"suspend": suspended_by_user(job)})


def _plans(
    spec: ParallelTrainingJobSpec, status: ParallelTrainingJobStatus, revision: str, placer: Placer
) -> list[Plan]:
    """The plan that runs; where none does for this revision of the spec, those to choose from, the best first."""
    same = status.plan is not None and status.plan.revision in ("", revision)
    kept = status.plan if same and has_started(status) else None
    inventory = placer.nodes(spec) if kept is None else NO_NODES
    try:
        if kept is not None:
            return [_running(spec.model_dump_json(), kept.model_dump_json())]
        return make_plans(spec, inventory, placer.calibration)
    except PlanError as error:
        strange = inventory.warnings if error.depends_on_cluster else ()
        raise RefusedError(error.reason, with_remarks(str(error), strange), waits=error.depends_on_cluster) from None
    except (ValueError, ArithmeticError, LookupError, TypeError) as error:
        # A fault of the planner's: the owner is told, and what runs goes on.
        log.exception("the planner failed")
        raise RefusedError("PlannerFailed", f"no plan was made: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=4096)
def _running(spec: str, kept: str) -> Plan:
    """The plan of a job that runs, both as JSON: nodes do not change it, so it is made once, not at every look."""
    return make_plan(ParallelTrainingJobSpec.model_validate_json(spec), NO_NODES, PlanStatus.model_validate_json(kept))


def _workers(
    spec: ParallelTrainingJobSpec,
    plan: Plan,
    status: ParallelTrainingJobStatus,
    pods: Sequence[Pod],
    cache: Cache,
    placer: Placer,
) -> tuple[list[Worker], list[Pod]]:
    named = {entry.node for entry in (status.placement.workers if status.placement else [])}
    down = {name: not _is_ready(cache.nodes[name]) for name in named | {p.node for p in pods} if name in cache.nodes}
    unbound = [pod.node for pod in pods if not pod.bound and not pod.terminal]
    bound = [pod.node for pod in pods if pod.bound and _may_be_leaving(cache.nodes.get(pod.node))]
    refused = placer.refusals(spec, [*unbound, *bound]) if unbound or bound else {}
    leaving = {name: why for name in bound if _is_leaving(why := refused.get(name, ""))}
    return observe_workers(len(plan.workers), status, pods, down, refused, leaving)


def _may_be_leaving(node: Object | None) -> bool:
    """Whether anything about the node keeps pods off: few nodes, so that no others need to be read."""
    return node is not None and bool(node["spec"].get("unschedulable") or node["spec"].get("taints"))


def _is_leaving(refusal: str) -> bool:
    """Whether a node that refuses pods for this reason is about to be emptied.

    Taints of the node's own condition (memory or disk pressure, not ready) come and go; that is no plan to empty it.
    """
    return refusal == "cordoned" or (
        refusal.startswith("taint ") and not refusal.startswith("taint node.kubernetes.io/")
    )


def _is_ready(node: Object) -> bool:
    return any(c.get("status") == "True" for c in node["status"]["conditions"])
