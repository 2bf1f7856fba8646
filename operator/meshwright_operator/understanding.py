"""From a raw job object to what decisions need: spec, plan and observed workers, or why that is impossible."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from meshwright.api.job import InvalidSpecError, parse_spec, parse_status
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright.planner.errors import PlanError
from meshwright.planner.inventory import Inventory
from meshwright.planner.plan import Plan, make_plan
from meshwright_operator.cache import Cache, JobKey, Object
from meshwright_operator.coordinator.board import Agents
from meshwright_operator.decide.observed import Observed, Worker, has_started, observe_workers
from meshwright_operator.decide.revision import revision_of
from meshwright_operator.placing import Placer
from meshwright_operator.pods import Pod


class RefusedError(Exception):
    """The job cannot be acted on. `waits`: another cluster could help; else only another spec can."""

    def __init__(self, reason: str, message: str, *, waits: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.waits = waits


def understand(key: JobKey, job: Object, cache: Cache, placer: Placer, agents: Agents, now: datetime) -> Observed:
    """One job and all that belongs to it, as the cache has it.

    Raises:
        RefusedError: the spec is invalid or cannot be planned.
    """
    metadata = job["metadata"]
    status = parse_status(job)
    try:
        spec = parse_spec(job)
    except InvalidSpecError as error:
        raise RefusedError("InvalidSpec", str(error)) from None
    revision = revision_of(spec)
    plan = _plan(spec, status, revision, placer)
    pods = cache.pods(key, metadata["uid"])
    workers, strays = _workers(spec, plan, status, pods, cache, placer)
    return Observed(
        now=now,
        name=key.name,
        uid=metadata["uid"],
        generation=int(metadata.get("generation", 0)),
        spec=spec,
        revision=revision,
        status=status,
        plan=plan,
        workers=workers,
        strays=strays,
        agents=agents,
    )


def _plan(spec: ParallelTrainingJobSpec, status: ParallelTrainingJobStatus, revision: str, placer: Placer) -> Plan:
    """The plan that runs, or a new one when none does for this revision of the spec."""
    same = status.plan is not None and status.plan.revision in ("", revision)
    kept = status.plan if same and has_started(status) else None
    inventory = placer.nodes(spec) if kept is None else Inventory()
    try:
        return make_plan(spec, inventory, kept)
    except PlanError as error:
        raise RefusedError(error.reason, str(error), waits=error.depends_on_cluster) from None


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
    refused = placer.refusals(spec, unbound) if unbound else {}
    return observe_workers(len(plan.workers), status, pods, down, refused)


def _is_ready(node: Object) -> bool:
    return any(c.get("status") == "True" for c in node["status"]["conditions"])
