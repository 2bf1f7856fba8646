"""Plan, place, price again: the layout that is fastest on the nodes that are free, not on a drawing of the cluster.

Layouts of as many GPUs are often within a few percent of each other, and which one is best depends on what the cluster
has left: four free GPUs on each of many nodes want a narrower tensor-parallel group than whole nodes do. So each of the
near ones is placed and priced where it lands, and the best of those is the plan. The operator and `meshwright plan`
both decide here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.communication import weights_for
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.inventory import Inventory
from meshwright.planner.placement import Before, Placement, PlacingOptions, map_ranks, place_again
from meshwright.planner.plan import Plan, make_plans
from meshwright.planner.pricing import Calibration, Pricer, pricer_for
from meshwright.planner.recost import estimate_as_placed
from meshwright.planner.search.search import AS_GOOD


def choose_plan(
    spec: ParallelTrainingJobSpec, inventory: Inventory, calibration: Calibration | None = None
) -> tuple[Plan, Placement | None]:
    """The plan of a job that does not run yet, and its placement; None when no layout has room now.

    Raises:
        PlanError: the spec contradicts itself, or no layout fits this cluster's GPUs.
    """
    plans = make_plans(spec, inventory, calibration)
    try:
        placement = place_best(plans, inventory, pricer_for(spec, plans[0].architecture, inventory, calibration))
    except DoesNotFitError:
        return plans[0], None
    return placement.plan, placement


def place_best(plans: Sequence[Plan], inventory: Inventory, pricer: Pricer | None) -> Placement:
    """The placement of the plan that is best on what is free; its plan carries the estimate on those nodes.

    Among plans whose step takes at most 2 % longer than the fastest, the first wins. Without a price the first that
    has room does.

    Args:
        plans: layouts of one job, the one to prefer first.
        inventory: the nodes.
        pricer: the job's work and its GPUs, where they are known.

    Raises:
        DoesNotFitError: no plan has room; the text is about the first.
    """
    placed: list[Placement] = []
    problem: DoesNotFitError | None = None
    for plan in plans:
        if placed and not _promises(plan, placed):
            continue
        try:
            placed.append(place_plan(plan, inventory, pricer))
        except DoesNotFitError as error:
            problem = problem or error
    if not placed:
        assert problem is not None
        raise problem
    limit = AS_GOOD * min(_seconds(one.plan) for one in placed)
    chosen = next(one for one in placed if _seconds(one.plan) <= limit)
    return replace(chosen, plan=_told(chosen.plan, plans, [one.plan for one in placed]))


def place_plan(
    plan: Plan,
    inventory: Inventory,
    pricer: Pricer | None,
    keep: Mapping[int, str] | None = None,
    before: Before | None = None,
) -> Placement:
    """One plan placed by its own traffic, and priced where it lands.

    Args:
        plan: what runs.
        inventory: the nodes; it must not count this job's own pods.
        pricer: the job's work and its GPUs; without it groups weigh what such groups usually send.
        keep: workers that run and stay.
        before: where the job was.

    Raises:
        DoesNotFitError: there is no room.
    """
    if pricer is None:
        return place_again(plan, inventory, keep, before)
    pricer = plan.pricer(pricer)
    weights = weights_for(pricer, plan.layout, plan.micro_batches, plan.gpus_per_worker, inventory.levels)
    placement = place_again(plan, inventory, keep, before, PlacingOptions(weights))
    return replace(placement, plan=replace(plan, estimate=estimate_as_placed(placement, pricer)))


def map_plan(
    plan: Plan, inventory: Inventory, pricer: Pricer | None, pods: Mapping[int, str], stay: Mapping[int, int]
) -> tuple[Placement, dict[int, int]]:
    """The best map of a plan's ranks onto the nodes that another scheduler gave its pods, by the plan's own traffic.

    Args and results are those of `map_ranks`; the placement's plan carries the estimate on those nodes.

    Raises:
        ValueError: as `map_ranks`.
    """
    if pricer is None:
        return map_ranks(plan, inventory, pods, stay)
    pricer = plan.pricer(pricer)
    weights = weights_for(pricer, plan.layout, plan.micro_batches, plan.gpus_per_worker, inventory.levels)
    placement, slots = map_ranks(plan, inventory, pods, stay, PlacingOptions(weights))
    return replace(placement, plan=replace(plan, estimate=estimate_as_placed(placement, pricer))), slots


def _promises(plan: Plan, placed: Sequence[Placement]) -> bool:
    """Whether a plan could still be the best: it is no faster where it lands than where ranks fill domains in order."""
    return plan.estimate is not None and plan.estimate.seconds < min(_seconds(one.plan) for one in placed)


def _seconds(plan: Plan) -> float:
    return plan.estimate.seconds if plan.estimate else 0.0


def _told(chosen: Plan, plans: Sequence[Plan], placed: Sequence[Plan]) -> Plan:
    """The chosen plan with what these nodes have to do with it: why this layout, and what its place costs it."""
    first, reasons = plans[0], list(chosen.reasons)
    if chosen.layout != first.layout:
        same = next((plan for plan in placed if plan.layout == first.layout), None)
        if same is None:
            why = f"{first.summary} would be faster, and has no room on what is free now"
        else:
            loss = _seconds(same) / _seconds(chosen) - 1
            why = f"on the nodes that are free now it is {loss:.0%} faster than {first.summary}"
        reasons.append(f"{chosen.summary}: {why}")
    drawn = next(_seconds(plan) for plan in plans if plan.layout == chosen.layout)
    if drawn and _seconds(chosen) > AS_GOOD * drawn:
        more = _seconds(chosen) / drawn - 1
        reasons.append(
            f"place: {_seconds(chosen):.3g} s per step on the nodes it got, {more:.0%} more than where each group is "
            "as close as domains allow"
        )
    return replace(chosen, reasons=tuple(reasons))
