"""Chooses the layout that is fastest on the free nodes, not on an empty cluster.

Layouts with the same number of GPUs often differ by only a few percent, and the best one depends on the free GPUs: four
free GPUs on each of many nodes need a narrower tensor-parallel group than entire nodes. Each of the best layouts is
therefore placed, and its cost is estimated for its nodes. The operator and `meshwright plan` both use this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshwright.figures import format_number
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cost_model import CostModel
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.placement import Placement, PlacingOptions, PreviousPlacement, map_ranks, place_near_previous
from meshwright.planner.placement.placed_cost import estimate_placed
from meshwright.planner.placement.traffic_weights import weights_for
from meshwright.planner.plan import Plan
from meshwright.planner.search.expand import TIE_TOLERANCE


def place_best(plans: Sequence[Plan], inventory: Inventory, cost_model: CostModel | None) -> Placement:
    """The placement of the plan that is best on the free nodes. Its plan has the estimate for these nodes.

    Among plans whose step takes at most 1% longer than the fastest, the first is chosen. Without a cost model, the
    first plan that fits is chosen.

    Args:
        plans: layouts of one job, the preferred one first.
        inventory: the nodes.
        cost_model: the job's work and its GPUs, if known.

    Raises:
        DoesNotFitError: no plan fits; the message is about the first.
    """
    placed: list[Placement] = []
    problem: DoesNotFitError | None = None
    for plan in plans:
        if placed and not _could_be_fastest(plan, placed):
            continue
        try:
            placed.append(place_plan(plan, inventory, cost_model))
        except DoesNotFitError as error:
            problem = problem or error
    if not placed:
        assert problem is not None
        raise problem
    limit = TIE_TOLERANCE * min(_seconds(one.plan) for one in placed)
    chosen = next(one for one in placed if _seconds(one.plan) <= limit)
    return replace(chosen, plan=_with_placement_reasons(chosen.plan, plans, [one.plan for one in placed]))


def place_plan(
    plan: Plan,
    inventory: Inventory,
    cost_model: CostModel | None,
    keep: Mapping[int, str] | None = None,
    before: PreviousPlacement | None = None,
) -> Placement:
    """Place one plan by its own traffic, and estimate its cost on these nodes.

    Args:
        plan: the plan.
        inventory: the nodes. It must not count this job's own pods.
        cost_model: the job's work and its GPUs. Without it, groups have default weights.
        keep: running workers that stay.
        before: the previous placement.

    Raises:
        DoesNotFitError: the plan does not fit.
    """
    if cost_model is None:
        return place_near_previous(plan, inventory, keep, before)
    weights = weights_for(cost_model, plan.strategy, plan.gpus_per_worker, inventory.levels, inventory.site)
    placement = place_near_previous(plan, inventory, keep, before, PlacingOptions(weights))
    placed_on = cost_model.on_nodes(inventory, placement.nodes.values())
    return replace(placement, plan=replace(plan, estimate=estimate_placed(placement, placed_on)))


def map_plan_ranks(
    plan: Plan, inventory: Inventory, cost_model: CostModel | None, pods: Mapping[int, str], stay: Mapping[int, int]
) -> tuple[Placement, dict[int, int]]:
    """The best mapping of a plan's ranks to the nodes that another scheduler chose for its pods, by its own traffic.

    Arguments and results are those of `map_ranks`. The placement's plan has the estimate for these nodes.

    Raises:
        ValueError: as `map_ranks`.
    """
    if cost_model is None:
        return map_ranks(plan, inventory, pods, stay)
    weights = weights_for(cost_model, plan.strategy, plan.gpus_per_worker, inventory.levels, inventory.site)
    placement, plan_workers = map_ranks(plan, inventory, pods, stay, PlacingOptions(weights))
    placed_on = cost_model.on_nodes(inventory, placement.nodes.values())
    return replace(placement, plan=replace(plan, estimate=estimate_placed(placement, placed_on))), plan_workers


def _could_be_fastest(plan: Plan, placed: Sequence[Placement]) -> bool:
    """Whether a plan could still be the best: it is at most as fast as if ranks filled domains in order."""
    return plan.estimate is not None and plan.estimate.seconds < min(_seconds(one.plan) for one in placed)


def _seconds(plan: Plan) -> float:
    return plan.estimate.seconds if plan.estimate else 0.0


def _with_placement_reasons(chosen: Plan, plans: Sequence[Plan], placed: Sequence[Plan]) -> Plan:
    """The chosen plan with reasons that depend on these nodes: why this layout, and the time that placement adds."""
    first_plan, reasons = plans[0], list(chosen.reasons)
    if chosen.layout != first_plan.layout:
        first_placed = next((plan for plan in placed if plan.layout == first_plan.layout), None)
        if first_placed is None:
            explanation = f"{first_plan.summary} would be faster, but does not fit on the GPUs that are free now"
        else:
            gain = _seconds(first_placed) / _seconds(chosen) - 1
            explanation = f"on the nodes that are free now it is {gain:.0%} faster than {first_plan.summary}"
        reasons.append(f"{chosen.summary}: {explanation}")
    ideal_seconds = next(_seconds(plan) for plan in plans if plan.layout == chosen.layout)
    if ideal_seconds and _seconds(chosen) > TIE_TOLERANCE * ideal_seconds:
        extra = _seconds(chosen) / ideal_seconds - 1
        reasons.append(
            f"placement: {format_number(_seconds(chosen))} s per step on the chosen nodes, {extra:.0%} more than with "
            "each group as close as domains allow"
        )
    return replace(chosen, reasons=tuple(reasons))
