"""The plans of an elastic job: that of its current size, and those of the sizes that it may have now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import ParallelTrainingJobStatus, PlanStatus
from meshwright.planner.errors import PlanError
from meshwright.planner.plan import Plan
from meshwright.rules.elastic import fixed_size, resized, sizes, wanted_replicas
from meshwright_operator.decide.observed import has_started
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.planning.planner import Planner


@dataclass(frozen=True, slots=True)
class SizePlans:
    """The plans of an elastic job."""

    spec: ParallelTrainingJobSpec
    """The spec with the number of replicas of `plan`."""
    plan: Plan
    """The plan of its current size. Before it starts, the preferred one."""
    sizes: Sequence[Plan] = ()
    """The plans of the sizes that it may have now, the largest first. Empty while its size need not change."""


def plan_sizes(
    key: JobKey,
    spec: ParallelTrainingJobSpec,
    status: ParallelTrainingJobStatus,
    revision: str,
    planner: Planner,
    limit: int | None = None,
) -> SizePlans:
    """The plans of an elastic job.

    Args:
        key: The job's key.
        spec: Its spec, with `elastic`.
        status: Its status.
        revision: The revision of the spec.
        planner: Has the plans.
        limit: The largest number of replicas that other jobs leave to it, if any.

    Raises:
        PlanError: No plan fits any size.
        PlanPendingError: A plan is being made.
    """
    wanted = wanted_replicas(spec)
    allowed = wanted if limit is None else min(wanted, limit)
    candidates = sizes(spec, allowed) or sizes(spec, wanted)[-1:]
    if not candidates:
        raise PlanError(_NO_SIZE.format(spec.training.global_batch_size if spec.training else 1), "InvalidSpec")
    same = status.plan is not None and status.plan.revision in ("", revision)
    running = status.plan if same and has_started(status) else None
    if running is None:
        return _before_the_start(key, spec, candidates, planner)
    return _after_the_start(key, spec, status, running, candidates, planner)


_NO_SIZE = (
    "No number of replicas from `elastic.minReplicas` to `replicas` divides `training.globalBatchSize` ({}): change one"
    " of them"
)


def _before_the_start(
    key: JobKey, spec: ParallelTrainingJobSpec, candidates: Sequence[int], planner: Planner
) -> SizePlans:
    """The best plan of the largest size, and the same degrees with fewer replicas."""
    full = resized(spec, candidates[0])
    assert full is not None
    first = planner.plans(key, full)[0]
    total = first.strategy.micro_batches * first.strategy.data
    rest = _plans(key, spec, candidates[1:], total, first.to_status(), planner)
    return SizePlans(full, first, [first, *rest])


def _after_the_start(
    key: JobKey,
    spec: ParallelTrainingJobSpec,
    status: ParallelTrainingJobStatus,
    running: PlanStatus,
    candidates: Sequence[int],
    planner: Planner,
) -> SizePlans:
    elastic, mesh = status.elastic, status.mesh
    total = elastic.micro_batches if elastic is not None and elastic.micro_batches else None
    if total is None and spec.training is not None:
        total = running.micro_batches * running.data
    # An edit may change how other sizes divide the batch, but not what runs now.
    current = fixed_size(spec, running.data, running.micro_batches if spec.training is not None else None)
    plan = planner.running_plan(key, current, running)
    trains = mesh is not None and mesh.generation > 0 and not mesh.pending_cause
    if trains and running.data == candidates[0]:
        return SizePlans(current, plan)
    known = {running.data: plan}
    others = _plans(key, spec, [count for count in candidates if count not in known], total, running, planner)
    known |= {other.layout.data: other for other in others}
    return SizePlans(current, plan, [known[count] for count in candidates if count in known])


def _plans(
    key: JobKey,
    spec: ParallelTrainingJobSpec,
    candidates: Sequence[int],
    total: int | None,
    keep: PlanStatus,
    planner: Planner,
) -> list[Plan]:
    """The plans with the degrees of `keep` and these numbers of replicas, without those that ranks would reject."""
    found = []
    for count in candidates:
        resized_spec = resized(spec, count, total)
        if resized_spec is None:
            continue
        try:
            plan = planner.running_plan(key, resized_spec, keep)
        except PlanError:
            continue
        if plan.layout.data == count and not plan.problems(resized_spec):
            found.append(plan)
    return found
