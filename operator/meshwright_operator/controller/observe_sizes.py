"""The plans of an elastic job: that of its current size, and those of the sizes that it may have now.

The sizes are numbers of replicas in the full layout. With `elastic.replan`, layouts that the job was planned anew for
follow, for fewer GPUs than the smallest number of replicas needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import LayoutStatus, ParallelTrainingJobStatus, PlanStatus
from meshwright.planner.errors import PlanError
from meshwright.planner.plan import Plan
from meshwright.planner.units import count_gpus
from meshwright.rules.elastic import continues_on_loss, resized, sizes, smallest_size, spec_of_plan, wanted_replicas
from meshwright.rules.replan import budgets, open_specs
from meshwright_operator.decide.observed import has_started
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.planning.planner import Planner, PlanPendingError


@dataclass(frozen=True, slots=True)
class SizePlans:
    """The plans of an elastic job."""

    spec: ParallelTrainingJobSpec
    """The spec with the number of replicas of `plan`."""
    plan: Plan
    """The plan of its current size. Before it starts, the preferred one."""
    full: PlanStatus
    """The layout that it has with enough nodes."""
    sizes: Sequence[Plan] = ()
    """The plans of the sizes that it may have now, the largest first. Empty while its size need not change."""


def plan_sizes(
    key: JobKey,
    spec: ParallelTrainingJobSpec,
    status: ParallelTrainingJobStatus,
    revision: str,
    planner: Planner,
    limit: int | None = None,
    gpus_left: int = 0,
    *,
    drains: bool = False,
) -> SizePlans:
    """The plans of an elastic job.

    Args:
        key: The job's key.
        spec: Its spec, with `elastic`.
        status: Its status.
        revision: The revision of the spec.
        planner: Has the plans.
        limit: The largest number of replicas that other jobs leave to it, if any.
        gpus_left: GPUs of its workers that run or start.
        drains: Whether nodes of its workers are draining: then it may have to shrink.

    Raises:
        PlanError: No plan fits any size.
        PlanPendingError: A plan is being made.
    """
    sizing = _Sizing(key, spec, planner, limit, gpus_left, drains)
    same = status.plan is not None and status.plan.revision in ("", revision)
    running = status.plan if same and has_started(status) else None
    if running is None:
        return sizing.before_the_start()
    return sizing.after_the_start(status, running)


_NO_SIZE = (
    "No number of replicas from `elastic.minReplicas` to `replicas` divides `training.globalBatchSize` ({}): change one"
    " of them"
)


@dataclass(frozen=True, slots=True)
class _Sizing:
    """Makes the plans of one job."""

    key: JobKey
    spec: ParallelTrainingJobSpec
    planner: Planner
    limit: int | None
    gpus_left: int
    drains: bool

    def before_the_start(self) -> SizePlans:
        """The best plan of the largest size, the same degrees with fewer replicas, and layouts for fewer GPUs."""
        if self.spec.gpus is not None:
            whole = self.spec.model_copy(update={"elastic": None})
            full = self.planner.plans(self.key, whole)[0].to_status()
            counts = self._counts(full)
            first = self._plans(counts[:1], full.micro_batches * full.data, full)
            largest = resized(self._counted(full), counts[0], full.micro_batches * full.data)
            if not first or largest is None:
                raise PlanError(_NO_SIZE.format(self._batch), "InvalidSpec")
            plan = replace(first[0], gpus=self.spec.gpus)
        else:
            counts = self._counts(None)
            largest = resized(self.spec, counts[0])
            assert largest is not None
            plan = self.planner.plans(self.key, largest)[0]
            full = plan.to_status()
        total = plan.strategy.micro_batches * plan.strategy.data
        found = [plan, *self._plans(counts[1:], total, full)]
        found += self._replans(full, self._least(full), 0)
        return SizePlans(largest, plan, full, found)

    def after_the_start(self, status: ParallelTrainingJobStatus, running: PlanStatus) -> SizePlans:
        """The running plan, and those of the sizes that the job may have now."""
        elastic, mesh = status.elastic, status.mesh
        total = elastic.micro_batches if elastic is not None and elastic.micro_batches else None
        if total is None and self.spec.training is not None:
            total = running.micro_batches * running.data
        full = running if elastic is None or elastic.full_plan is None else _plan_status(elastic.full_plan, running)
        counts = self._counts(full)
        current = spec_of_plan(self.spec, running)
        made = self.planner.running_plan(self.key, current, running)
        plan = replace(made, gpus=self.spec.gpus, replanned=bool(running.replanned))
        trains = mesh is not None and mesh.generation > 0 and not mesh.pending_cause
        may_shrink = self.drains or self._shrinks_on_loss
        if trains and running.data == counts[0] and not plan.replanned and not may_shrink:
            return SizePlans(current, plan, full)
        known = {} if plan.replanned else {running.data: plan}
        others = self._plans([count for count in counts if count not in known], total, full)
        known |= {other.layout.data: other for other in others}
        found = [known[count] for count in counts if count in known]
        if plan.replanned or not trains:
            found += self._replanned(plan, full, found, trains=trains)
        return SizePlans(current, plan, full, found)

    def _replanned(self, plan: Plan, full: PlanStatus, whole: Sequence[Plan], *, trains: bool) -> list[Plan]:
        """The layouts for fewer GPUs than `whole` that the job may have now, the largest first. `plan` runs."""
        own = plan.layout.world_size
        above = own if trains else 0
        try:
            found = self._replans(full, self._least(full), above)
        except PlanPendingError:
            found = []  # the job is reconciled again when they are there, and until then it needs none of them
        if plan.replanned:
            found = [one for one in found if one.layout.world_size != own]
            if all(one.layout.world_size != own for one in whole):
                found.append(plan)
        return sorted(found, key=lambda one: -one.layout.world_size)

    def _replans(self, full: PlanStatus, least: int, above: int) -> list[Plan]:
        """The plans for fewer than `least` GPUs, and for more than `above`, the largest first."""
        elastic = self.spec.elastic
        if elastic is None or not elastic.replan:
            return []
        smallest = max(above + 1, elastic.min_gpus or 1)
        found: list[Plan] = []
        for gpus in budgets(self.spec, least, self.gpus_left):
            if gpus < smallest or (found and found[-1].layout.world_size <= gpus):
                continue
            plan = self._planned_for(gpus)
            if plan is not None and plan.layout.world_size >= smallest:
                size = f"planned anew for {count_gpus(gpus)} (`elastic.replan`)"
                why = f"{size}; with more, the job returns to {layout(full)}"
                found.append(replace(plan, replanned=True, gpus=self.spec.gpus, reasons=(why, *plan.reasons)))
        return found

    def _planned_for(self, gpus: int) -> Plan | None:
        for spec in open_specs(self.spec, gpus):
            try:
                return self.planner.plans(self.key, spec)[0]
            except PlanError:
                continue
        return None

    def _plans(self, counts: Sequence[int], total: int | None, keep: PlanStatus) -> list[Plan]:
        """The plans in the full layout with these numbers of replicas, without those that ranks would reject."""
        asked = self.spec, tuple(counts), total, keep
        return self.planner.sizes(self.key, asked, lambda: self._checked_plans(counts, total, keep))

    def _checked_plans(self, counts: Sequence[int], total: int | None, keep: PlanStatus) -> list[Plan]:
        found = []
        spec = self._counted(keep)
        for count in counts:
            resized_spec = resized(spec, count, total)
            if resized_spec is None:
                continue
            try:
                plan = self.planner.running_plan(self.key, resized_spec, keep)
            except PlanError:
                continue
            if plan.layout.data == count and not plan.problems(resized_spec):
                found.append(replace(plan, gpus=self.spec.gpus))
        return found

    def _counts(self, full: PlanStatus | None) -> list[int]:
        """The numbers of replicas that the job may have now, the largest first."""
        spec = self._counted(full)
        wanted = wanted_replicas(spec)
        allowed = wanted if self.limit is None else min(wanted, self.limit)
        counts = sizes(spec, allowed) or sizes(spec, wanted)[-1:]
        if not counts:
            raise PlanError(_NO_SIZE.format(self._batch), "InvalidSpec")
        return counts

    def _counted(self, full: PlanStatus | None) -> ParallelTrainingJobSpec:
        """The spec with a number of replicas: with `gpus`, that of the full plan."""
        if self.spec.gpus is None or full is None:
            return self.spec
        return self.spec.model_copy(update={"gpus": None, "replicas": full.data})

    @property
    def _shrinks_on_loss(self) -> bool:
        """Whether the decision that ends a generation needs the smaller sizes."""
        return continues_on_loss(self.spec)

    @property
    def _batch(self) -> int:
        return self.spec.training.global_batch_size if self.spec.training else 1

    def _least(self, full: PlanStatus) -> int:
        """GPUs of the smallest number of replicas in the full layout."""
        return smallest_size(self.spec) * full.tensor * full.pipeline * full.context


def layout(plan: LayoutStatus) -> str:
    """The degrees of a layout, such as `TP 2 x PP 2 x DP 1`."""
    context = f"CP {plan.context} x " if plan.context > 1 else ""
    return f"TP {plan.tensor} x {context}PP {plan.pipeline} x DP {plan.data}"


def _plan_status(full: LayoutStatus, running: PlanStatus) -> PlanStatus:
    """The stored layout as the plan of a running job, with the environment of the plan that runs."""
    world = full.tensor * full.pipeline * full.context * full.data
    return PlanStatus(**full.model_dump(), world_size=world, workers=0, environment=running.environment)
