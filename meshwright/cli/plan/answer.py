"""The answer to `meshwright plan`: what the operator would do with this job on these nodes, and what it would not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.api.job import parse_spec
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.choose import place_best
from meshwright.planner.communication import weights_for
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.inventory import Inventory
from meshwright.planner.job import CHECKPOINTING, SCHEDULES
from meshwright.planner.placement import Placement, PlacingOptions, cost_of_fragmentation, nodes_to_free, with_spares
from meshwright.planner.plan import Plan, make_plans
from meshwright.planner.pricing import Pricer, pricer_for
from meshwright.planner.propose import proposed, wide_request
from meshwright.planner.search.errors import NothingFitsError
from meshwright.planner.search.explain import Lost, neighbours
from meshwright.planner.search.found import Found
from meshwright.planner.search.request import EVERY_TECHNIQUE, MESHWRIGHT_RUNTIME, Objective, Pins, Request, Techniques
from meshwright.planner.search.search import Result, search
from meshwright.planner.search.whatif import WhatIf, what_ifs

MAX_NAMED = 8
"""Nodes to free that are named."""
QUICK_EFFORT = 50_000
"""Search for a placement that only serves to compare."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a job would get."""

    spec: ParallelTrainingJobSpec
    inventory: Inventory
    plan: Plan
    placement: Placement | None
    pending: str
    """Why it would wait, what fits now, and which nodes to free; empty when it is placed."""
    leftovers: float = 0.0
    """What the placement costs more than on the same nodes with nothing else on them."""
    drawn: Estimate | None = None
    """The plan's estimate with each group as close as domains allow; `plan.estimate` is on the nodes it got."""
    lost: tuple[Lost, ...] = ()
    """The plan with one decision changed, and why that was not taken."""
    wider: Result | None = None
    """The best layout if the whole cluster were the job's and every degree free."""
    what_if: tuple[WhatIf, ...] = ()
    proposal: ParallelTrainingJobSpec | None = None
    """The job in the layout of `wider`; None where other runtimes' techniques were allowed."""

    @property
    def gpus(self) -> int:
        """GPUs of all usable nodes."""
        return sum(node.capacity.gpus for node in self.inventory.usable)


def answer(
    job: dict[str, Any],
    nodes: Sequence[dict[str, Any]],
    pods: Sequence[dict[str, Any]],
    *,
    objective: Objective = Objective.TIME,
    every_technique: bool = False,
    with_what_if: bool = False,
) -> Answer:
    """Plan, place, and look around.

    Args:
        job: a ParallelTrainingJob object.
        nodes: raw Node objects.
        pods: raw Pod objects that take room on them.
        objective: of the look around; the plan itself is the operator's.
        every_technique: look around among all techniques of the field, not only those of this runtime.
        with_what_if: also ask what a better cluster would give.

    Raises:
        InvalidSpecError: the job does not fit the schema.
        PlanError: the job contradicts itself, or no layout fits this cluster's GPUs.
    """
    spec = parse_spec(job)
    inventory = Inventory.from_objects(
        nodes,
        pods,
        gpu_resource=spec.workers.gpu_resource,
        node_selector=spec.workers.node_selector,
        tolerations=spec.workers.tolerations,
    )
    plans = make_plans(spec, inventory)
    plan, placement, pending = plans[0], None, ""
    pricer = pricer_for(spec, plan.architecture, inventory)
    try:
        placement = with_spares(place_best(plans, inventory, pricer), inventory, spec.recovery.spare_nodes)
        plan = placement.plan
    except DoesNotFitError as error:
        pending = "; ".join(filter(None, (str(error), _to_free(plan, inventory))))
    leftovers = _leftovers(placement, inventory, pricer) if placement else 0.0
    if pricer is None:
        return Answer(spec, inventory, plan, placement, pending, leftovers)
    techniques = EVERY_TECHNIQUE if every_technique else MESHWRIGHT_RUNTIME
    drawn = plan.pricer(pricer).price(plan.layout, plan.micro_batches)
    wider = _wider(spec, inventory, pricer, objective, techniques)
    return Answer(
        spec,
        inventory,
        plan,
        placement,
        pending,
        leftovers,
        drawn=drawn,
        lost=_lost(spec, plan, drawn, pricer, techniques),
        wider=wider,
        what_if=what_ifs(wider) if with_what_if and wider else (),
        proposal=proposed(spec, wider.best.choices) if wider and not every_technique else None,
    )


def _to_free(plan: Plan, inventory: Inventory) -> str:
    found = nodes_to_free(plan, inventory)
    if found is None:
        return ""
    more = f" and {len(found.nodes) - MAX_NAMED} more" if len(found.nodes) > MAX_NAMED else ""
    return f"freeing {', '.join(found.nodes[:MAX_NAMED])}{more} ({found.gpus} GPUs in use) would make room"


def _leftovers(placement: Placement, inventory: Inventory, pricer: Pricer | None) -> float:
    plan = placement.plan
    if pricer is None:
        return cost_of_fragmentation(placement, inventory)
    weights = weights_for(plan.pricer(pricer), plan.layout, plan.micro_batches, plan.gpus_per_worker, inventory.levels)
    return cost_of_fragmentation(placement, inventory, PlacingOptions(weights, effort=QUICK_EFFORT))


def _lost(
    spec: ParallelTrainingJobSpec, plan: Plan, drawn: Estimate, pricer: Pricer, techniques: Techniques
) -> tuple[Lost, ...]:
    """What else there was, as `drawn` was: neither it nor the others placed."""
    chosen = Found(plan.pricer(pricer).choices(plan.layout, plan.micro_batches), drawn, pricer.machine.gpu.node)
    request = Request(
        pricer.work,
        pricer.machine,
        plan.layout.world_size,
        techniques=techniques,
        pins=_given(spec),
        numbers=pricer.job.numbers,
        settings=pricer.job.settings,
        gpus_per_worker=spec.workers.gpus_per_worker,
    )
    return neighbours(request, chosen)


def _given(spec: ParallelTrainingJobSpec) -> Pins:
    """What the job states itself: nothing else is worth comparing it with."""
    asked = spec.parallelism
    again = spec.training.activation_checkpointing if spec.training is not None else None
    return Pins(
        tensor=asked.tensor,
        pipeline=asked.pipeline,
        zero_stage=asked.zero_stage,
        context=asked.context,
        context_method=asked.context_method,
        schedule=SCHEDULES[asked.schedule] if asked.schedule is not None else None,
        recompute=CHECKPOINTING[again] if again is not None else None,
    )


def _wider(
    spec: ParallelTrainingJobSpec, inventory: Inventory, pricer: Pricer, objective: Objective, techniques: Techniques
) -> Result | None:
    gpus = sum(node.capacity.gpus for node in inventory.usable)
    request = wide_request(spec, pricer, gpus, objective, techniques)
    try:
        return search(request)
    except NothingFitsError:
        return None
