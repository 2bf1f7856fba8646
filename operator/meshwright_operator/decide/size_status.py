"""The size of an elastic job in its status: plan, placement, and incarnations of its workers."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.api import conditions as names
from meshwright.api.conditions import find, is_true
from meshwright.api.status import (
    ElasticStatus,
    LayoutStatus,
    ParallelTrainingJobStatus,
    PlacementStatus,
    WorkerPlacement,
)
from meshwright.planner.placement import Placement
from meshwright.planner.plan import Plan
from meshwright.rules.recovery_times import LOSSES
from meshwright_operator.decide import in_memory, restart_policy, sizing
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.gang_actions import Size
from meshwright_operator.decide.observed import Observed, has_started
from meshwright_operator.text import counted
from meshwright_operator.timestamps import format_time, parse_time

REPLANNING = "Replanning"
"""Reason of the condition `Rescaling` while the job changes to a layout with other degrees."""
MOVING = "Moving"
"""Reason of the condition `Rescaling` while workers move off draining nodes beside the job."""


def elastic_status(decision: Decision) -> ElasticStatus:
    """`status.elastic` of the decision, created if it is missing."""
    if decision.status.elastic is None:
        decision.status.elastic = ElasticStatus()
    return decision.status.elastic


def apply_size(decision: Decision, plan: Plan, placement: PlacementStatus, why: str) -> None:
    """Takes over the plan and the placement of another size. Ends the generation if one runs."""
    observed, status = decision.observed, decision.status
    new = plan.layout.data
    status.plan = plan.to_status()
    status.plan.revision = observed.revision
    status.replicas = new
    resized_before, cut = elastic_status(decision).resized_time, _loss_since_growth_began(observed)
    use_placement(decision, placement)
    _report_size(decision, plan, why)
    if cut:  # the growth that replaces what was lost meanwhile does not wait for `pauseSeconds`
        elastic_status(decision).resized_time = resized_before
    if observed.mesh.generation > 0 and not decision.mesh.pending_cause:
        decision.count_restart(restart_policy.RESCALED)
        decision.mesh.pending_cause = restart_policy.RESCALED.name
        decision.mesh.pending_since = format_time(observed.now)
    text = layout_text(plan) if plan.replanned or observed.plan.replanned else counted(new, "replica")
    how = "Continuing" if in_memory.continues(observed) else "Saving a checkpoint, then continuing"
    decision.starting(f"{how} with {text}")


def use_placement(decision: Decision, placement: PlacementStatus) -> None:
    """Takes over the workers of a placement. Those that were to join the job are among them, or end."""
    _set_placement(decision, placement)
    record_incarnations(decision, placement)
    elastic = elastic_status(decision)
    elastic.next_placement, elastic.growing_since = None, None
    elastic.attempts, elastic.retry_time = 0, None


def _set_placement(decision: Decision, placement: PlacementStatus) -> None:
    """Records the placement of a job that has nodes, also in the message of `Placed`."""
    decision.status.placement = placement
    if is_true(decision.status.conditions, names.PLACED):
        decision.condition(names.PLACED, True, "Placed", placement_text(placement))


def placement_text(placement: PlacementStatus) -> str:
    """The placement in one sentence."""
    nodes = {entry.node for entry in placement.workers}
    racks = {entry.rack for entry in placement.workers if entry.rack}
    where = f" in {counted(len(racks), 'rack')}" if racks else ""
    return (
        f"{counted(len(placement.workers), 'worker')} on {counted(len(nodes), 'node')}{where},"
        f" network cost {placement.cost or '0'}"
    )


def apply_move(decision: Decision, placement: PlacementStatus, leaving: str) -> None:
    """Takes over the placement in which new workers have replaced those on draining nodes, and ends the generation."""
    observed = decision.observed
    use_placement(decision, placement)
    text = f"Saving a checkpoint, then moving {leaving}, whose replacements are ready"
    decision.add_cause_event(restart_policy.NODE_DRAINED, text)
    decision.count_restart(restart_policy.NODE_DRAINED)
    decision.mesh.pending_cause = restart_policy.NODE_DRAINED.name
    decision.mesh.pending_since = format_time(observed.now)
    decision.condition(names.RESCALING, True, MOVING, text)
    decision.starting(text)


def is_moving(status: ParallelTrainingJobStatus) -> bool:
    """Whether workers move off draining nodes beside the job, until all ranks train again."""
    condition = find(status.conditions, names.RESCALING)
    return condition is not None and condition.status == "True" and condition.reason == MOVING


def place_size(decision: Decision, placement: Placement, size: Size) -> None:
    """Takes over the size that was placed while no generation runs, and creates the pods of its new workers."""
    observed, status = decision.observed, decision.status
    changes = observed.plan.layout != size.plan.layout
    started = has_started(observed.status)
    incarnations = incarnations_of(observed, size)
    if not started or changes:
        status.plan = size.plan.to_status() if started else placement.plan.to_status()
        status.plan.revision = observed.revision
    status.placement = placement.to_status(observed.name, incarnations, size.plan_workers)
    status.replicas = size.replicas
    record_incarnations(decision, status.placement)
    decision.create += list(size.new_workers)
    if not changes:
        return
    if started and not size.new_workers and sizing.shrinks_on_loss(observed):
        _report_loss(decision, size.plan)
    else:
        _report_size(decision, size.plan, _why_this_size(decision, size.plan))


def apply_loss(decision: Decision, plan: Plan, placement: PlacementStatus, following: PlacementStatus) -> None:
    """Takes over the size that is left after a loss, while workers that start beside the job keep starting.

    Args:
        decision: The decision. Its generation has ended.
        plan: The smaller plan.
        placement: The workers that continue.
        following: The placement once the workers that start have joined.
    """
    observed, status = decision.observed, decision.status
    status.plan = plan.to_status()
    status.plan.revision = observed.revision
    status.replicas = plan.layout.data
    _set_placement(decision, placement)
    elastic = elastic_status(decision)
    elastic.next_placement = following
    record_incarnations(decision, following)
    _report_loss(decision, plan)


def _loss_since_growth_began(observed: Observed) -> bool:
    """Whether the generation was formed after a loss of workers while others already started beside the job."""
    began, formed = parse_time(sizing.state(observed).growing_since), parse_time(observed.mesh.started_time)
    return observed.mesh.cause in LOSSES and began is not None and formed is not None and formed >= began


def _report_loss(decision: Decision, plan: Plan) -> None:
    resized_before = elastic_status(decision).resized_time
    _report_size(decision, plan, "workers were lost")
    # The replacements start at once: `pauseSeconds` counts from the last resize that was no loss.
    elastic_status(decision).resized_time = resized_before


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


def remember_full_plan(decision: Decision) -> None:
    """Records the full layout, to which a job returns after it was planned anew for fewer GPUs."""
    observed, elastic = decision.observed, elastic_status(decision)
    assert observed.elastic is not None
    assert observed.elastic.elastic is not None
    if observed.full_plan is None or not (observed.elastic.elastic.replan or observed.plan.replanned):
        elastic.full_plan = None
    else:
        fields = {name: getattr(observed.full_plan, name) for name in LayoutStatus.model_fields}
        elastic.full_plan = LayoutStatus(**fields)


def is_replanning(status: ParallelTrainingJobStatus) -> bool:
    """Whether the job is about to continue in a layout with other degrees than before."""
    condition = find(status.conditions, names.RESCALING)
    return condition is not None and condition.status == "True" and condition.reason == REPLANNING


def layout_text(plan: Plan) -> str:
    """The layout and its GPUs, such as `TP 2 on 2 GPUs`."""
    used = plan.layout
    degrees = {"TP": used.tensor, "CP": used.context, "PP": used.pipeline, "DP": used.data}
    named = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
    experts = f", EP {used.expert}" if used.expert > 1 else ""
    return f"{named or 'one rank'}{experts} on {counted(used.world_size, 'GPU')}"


def change_text(observed: Observed, plan: Plan) -> str:
    """What a growth to this plan does, after `to`."""
    own = observed.plan
    if own.replanned or plan.replanned:
        return f"continue as {layout_text(plan)} instead of {layout_text(own)}"
    return f"grow from {counted(own.layout.data, 'replica')} to {plan.layout.data}"


def _why_this_size(decision: Decision, plan: Plan) -> str:
    spec = decision.observed.elastic
    if plan.replanned and spec is not None and spec.elastic is not None:
        least = counted(spec.elastic.min_replicas, "replica")
        return f"the nodes that are left do not fit {least} in the full layout"
    if plan.layout.data == sizing.wanted(decision.observed):
        return sizing.wanted_text(plan)
    return "that is what the free nodes allow"


def _report_size(decision: Decision, plan: Plan, why: str) -> None:
    elastic, own = elastic_status(decision), decision.observed.plan
    elastic.resized_time = format_time(decision.observed.now)
    if plan.replanned or own.replanned:
        text = f"Continues as {layout_text(plan)} instead of {layout_text(own)}, because {why}"
        kept = (restart_policy.SPEC_CHANGED.name, restart_policy.RESUME.name)
        restarts = decision.observed.mesh.generation > 0 and decision.mesh.pending_cause not in kept
        reason = REPLANNING if restarts else "Shrinking"
    else:
        text = f"From {counted(own.layout.data, 'replica')} to {plan.layout.data}: {why}"
        reason = "Growing" if plan.layout.data > own.layout.data else "Shrinking"
    decision.add_event(restart_policy.RESCALED.name, text)
    decision.condition(names.RESCALING, True, reason, text)
