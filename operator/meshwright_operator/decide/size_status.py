"""The size of an elastic job in its status: plan, placement, and incarnations of its workers."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.api import conditions as names
from meshwright.api.status import ElasticStatus, PlacementStatus, WorkerPlacement
from meshwright.planner.placement import Placement
from meshwright.planner.plan import Plan
from meshwright_operator.decide import restart_policy, sizing
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.gang_actions import Size
from meshwright_operator.decide.observed import Observed, has_started
from meshwright_operator.text import counted
from meshwright_operator.timestamps import format_time


def elastic_status(decision: Decision) -> ElasticStatus:
    """`status.elastic` of the decision, created if it is missing."""
    if decision.status.elastic is None:
        decision.status.elastic = ElasticStatus()
    return decision.status.elastic


def apply_size(decision: Decision, plan: Plan, placement: PlacementStatus, why: str) -> None:
    """Takes over the plan and the placement of another size. Ends the generation if one runs."""
    observed, status = decision.observed, decision.status
    own, new = sizing.current_size(observed), plan.layout.data
    status.plan = plan.to_status()
    status.plan.revision = observed.revision
    status.placement, status.replicas = placement, new
    record_incarnations(decision, placement)
    elastic = elastic_status(decision)
    elastic.next_placement, elastic.growing_since = None, None
    elastic.attempts, elastic.retry_time = 0, None
    _report_size(decision, own, new, why)
    if observed.mesh.generation > 0 and not decision.mesh.pending_cause:
        decision.count_restart(restart_policy.RESCALED)
        decision.mesh.pending_cause = restart_policy.RESCALED.name
        decision.mesh.pending_since = format_time(observed.now)
    decision.starting(f"Saving a checkpoint, then continuing with {counted(new, 'replica')}")


def place_size(decision: Decision, placement: Placement, size: Size) -> None:
    """Takes over the size that was placed while no generation runs, and creates the pods of its new workers."""
    observed, status = decision.observed, decision.status
    own, new = sizing.current_size(observed), size.replicas
    started = has_started(observed.status)
    incarnations = incarnations_of(observed, size)
    if not started or own != new:
        status.plan = size.plan.to_status() if started else placement.plan.to_status()
        status.plan.revision = observed.revision
    status.placement = placement.to_status(observed.name, incarnations, size.plan_workers)
    status.replicas = new
    record_incarnations(decision, status.placement)
    decision.create += list(size.new_workers)
    if own != new:
        _report_size(decision, own, new, "that is what the free nodes allow")


def incarnations_of(observed: Observed, size: Size) -> Mapping[int, int]:
    """Worker -> incarnation with this size: that of its pod, or one that no pod of the job ever had."""
    known = {worker.index: worker.incarnation for worker in observed.workers}
    fresh = sizing.next_incarnation(observed, known)
    new = set(size.new_workers)
    return {worker: fresh if worker in new else known[worker] for worker in size.plan_workers}


def record_incarnations(decision: Decision, placement: PlacementStatus) -> None:
    """Records the highest incarnation in `status.elastic`."""
    before = decision.observed.status.placement
    entries: list[WorkerPlacement] = [*placement.workers, *(before.workers if before is not None else [])]
    elastic = elastic_status(decision)
    elastic.incarnation = max([elastic.incarnation, *(entry.incarnation for entry in entries)])


def _report_size(decision: Decision, own: int, new: int, why: str) -> None:
    elastic = elastic_status(decision)
    elastic.resized_time = format_time(decision.observed.now)
    text = f"From {counted(own, 'replica')} to {new}: {why}"
    decision.add_event(restart_policy.RESCALED.name, text)
    decision.condition(names.RESCALING, True, "Growing" if new > own else "Shrinking", text)
