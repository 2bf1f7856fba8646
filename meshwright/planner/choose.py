"""Plan, place, price again: the layout that is fastest on the nodes that are free, not on a drawing of the cluster.

Layouts of as many GPUs are often within a few percent of each other, and which one is best depends on what the cluster
has left: four free GPUs on each of many nodes want a narrower tensor-parallel group than whole nodes do. So each of the
near ones is placed and priced where it lands, and the best of those is the plan.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.inventory import Inventory
from meshwright.planner.placement import Placement, place
from meshwright.planner.plan import Plan, make_plans
from meshwright.planner.pricing import Calibration, pricer_for
from meshwright.planner.recost import estimate_as_placed
from meshwright.planner.search.search import AS_GOOD

MAX_PLACED = 6
"""Layouts to place: each costs a placement."""


def choose_plan(
    spec: ParallelTrainingJobSpec, inventory: Inventory, calibration: Calibration | None = None
) -> tuple[Plan, Placement | None]:
    """The plan of a job that does not run yet, and its placement; None when no layout has room now.

    Raises:
        PlanError: the spec contradicts itself, or no layout fits this cluster's GPUs.
    """
    plans = make_plans(spec, inventory, calibration)
    pricer = pricer_for(spec, plans[0].architecture, inventory, calibration)
    placed: list[tuple[Plan, Placement]] = []
    for plan in plans[:MAX_PLACED]:
        try:
            placement = place(plan, inventory)
        except DoesNotFitError:
            continue
        if pricer is not None:
            plan = replace(plan, estimate=estimate_as_placed(placement, pricer))
        placed.append((plan, placement))
        if pricer is None:
            break
    if not placed:
        return plans[0], None
    limit = AS_GOOD * min(_seconds(plan) for plan, _ in placed)
    chosen, placement = next((plan, placement) for plan, placement in placed if _seconds(plan) <= limit)
    return _told(chosen, plans[0], [plan for plan, _ in placed]), placement


def _seconds(plan: Plan) -> float:
    return plan.estimate.seconds if plan.estimate else 0.0


def _told(chosen: Plan, first: Plan, placed: list[Plan]) -> Plan:
    """The chosen plan, with the reason when what is free decided for another layout than the cluster at large."""
    if chosen.layout == first.layout:
        return chosen
    same = next((plan for plan in placed if plan.layout == first.layout), None)
    if same is None:
        why = f"{first.summary} would be faster, and has no room on what is free now"
    else:
        loss = _seconds(same) / _seconds(chosen) - 1
        why = f"on the nodes that are free now it is {loss:.0%} faster than {first.summary}"
    return replace(chosen, reasons=(*chosen.reasons, f"{chosen.summary}: {why}"))
