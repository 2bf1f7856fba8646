"""The report of `meshwright plan`: what the operator would do with a job on these nodes, and the alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.api.parsing import parse_spec
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cluster.limits import ClusterLimits
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.cost_model import CostModel, cost_model_for
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.placement import Placement, PlacingOptions, cost_of_fragmentation, nodes_to_free, with_spares
from meshwright.planner.placement.traffic_weights import weights_for
from meshwright.planner.plan import Plan, make_plans
from meshwright.planner.plan_and_place import place_best
from meshwright.planner.search.alternatives import RejectedAlternative, alternatives_of
from meshwright.planner.search.best_first import SearchResult, search
from meshwright.planner.search.candidate import Candidate
from meshwright.planner.search.errors import NothingFitsError
from meshwright.planner.search.expand import TIE_TOLERANCE
from meshwright.planner.search.request import (
    ALL_TECHNIQUES,
    MESHWRIGHT_TECHNIQUES,
    Objective,
    SearchRequest,
    Techniques,
)
from meshwright.planner.search.spec_request import apply_strategy, pinned_request, search_request
from meshwright.planner.search.what_if import WhatIf, what_ifs
from meshwright.planner.topology.site import DEFAULT_SITE, SiteFabric
from meshwright.planner.units import count_gpus
from meshwright.rules.elastic import with_own_batch
from meshwright.rules.likely_mistakes import likely_mistakes_of_spec
from meshwright_cli.plan.pod_additions import NO_ADDITIONS, PodAdditions

MAX_NAMED = 8
"""Largest number of nodes to free that a message names."""
UNNAMED = "job"
"""The name in place of that of a job that has none yet."""
QUICK_EFFORT = 50_000
"""Search effort for a placement that is only compared with."""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Plan, placement and alternatives of one job."""

    spec: ParallelTrainingJobSpec
    inventory: Inventory
    plan: Plan
    placement: Placement | None
    pending: str
    """Why the job would wait, what fits now, and which nodes to free. Empty if it is placed."""
    fragmentation_cost: float = 0.0
    """Cost of the placement minus its cost on the same nodes without other pods."""
    ideal_estimate: Estimate | None = None
    """The plan's estimate if each group were as close as domains allow, without a placement."""
    rejected: tuple[RejectedAlternative, ...] = ()
    """The plan with one decision changed, and why that was rejected."""
    whole_cluster: SearchResult | None = None
    """The best layout for all GPUs of the cluster, with every degree free."""
    what_if: tuple[WhatIf, ...] = ()
    proposal: ParallelTrainingJobSpec | None = None
    """The job in the layout of `whole_cluster`. None if techniques of other runtimes were allowed."""
    name: str = UNNAMED
    """The job's name, with which the names of its pods begin."""

    @property
    def gpus(self) -> int:
        """GPUs of all usable nodes, in complete workers."""
        return _gpus_of_workers(self.spec, self.inventory)


def plan_report(
    job: dict[str, Any],
    nodes: Sequence[dict[str, Any]],
    pods: Sequence[dict[str, Any]],
    *,
    objective: Objective = Objective.TIME,
    every_technique: bool = False,
    with_what_if: bool = False,
    site: SiteFabric = DEFAULT_SITE,
    additions: PodAdditions = NO_ADDITIONS,
) -> PlanReport:
    """Plan and place a job, and compare alternatives.

    Args:
        job: a ParallelTrainingJob object.
        nodes: raw Node objects.
        pods: raw Pod objects that use their resources.
        objective: of the search over all degrees. The plan itself does not depend on it.
        every_technique: also search techniques that this runtime does not implement.
        with_what_if: also estimate the step time on better hardware.
        site: what the administrator states about the fabric.
        additions: what the job's profile and claims add to its pods.

    Raises:
        InvalidSpecError: the job violates the schema.
        PlanError: the job's fields contradict each other, or no layout fits the cluster's GPUs.
    """
    spec = additions.spec_of(parse_spec(job))
    inventory = additions.explained(inventory_of(spec, additions.nodes_of(nodes, pods), pods, site))
    mistakes = [f"`{mistake.field}` {mistake.message}" for mistake in likely_mistakes_of_spec(spec)]
    inventory = replace(inventory, warnings=(*inventory.warnings, *mistakes))
    plans = [additions.extended(spec, plan) for plan in make_plans(spec, inventory)]
    cost_model = cost_model_for(with_own_batch(spec), plans[0].architecture, inventory)
    name = str((job.get("metadata") or {}).get("name") or UNNAMED)
    placed = replace(_placed(spec, plans, inventory, cost_model), name=name)
    if cost_model is None:
        return placed
    techniques = ALL_TECHNIQUES if every_technique else MESHWRIGHT_TECHNIQUES
    found = _with_alternatives(placed, cost_model, objective, techniques)
    best = found.whole_cluster
    return replace(
        found,
        what_if=what_ifs(best) if with_what_if and best else (),
        proposal=apply_strategy(spec, best.best.strategy) if best and not every_technique else None,
    )


def _placed(
    spec: ParallelTrainingJobSpec, plans: Sequence[Plan], inventory: Inventory, cost_model: CostModel | None
) -> PlanReport:
    """The plan that is placed best, or why none fits now."""
    try:
        placement = with_spares(place_best(plans, inventory, cost_model), inventory, spec.recovery.spare_nodes)
    except DoesNotFitError as error:
        pending = ". ".join(filter(None, (str(error), _nodes_to_free(plans[0], inventory))))
        return PlanReport(spec, inventory, plans[0], None, pending)
    cost = _fragmentation_cost(placement, inventory, cost_model)
    return PlanReport(spec, inventory, placement.plan, placement, "", cost)


def _with_alternatives(
    placed: PlanReport, cost_model: CostModel, objective: Objective, techniques: Techniques
) -> PlanReport:
    """The report with what the plan is compared with: on the nodes of its placement, and on the whole cluster."""
    spec, inventory = with_own_batch(placed.spec), placed.inventory
    on_nodes = cost_model
    if placed.placement is not None:
        on_nodes = cost_model.on_nodes(inventory, placed.placement.nodes.values())
    ideal_estimate = on_nodes.estimate(placed.plan.strategy)
    return replace(
        placed,
        ideal_estimate=ideal_estimate,
        rejected=_lost(spec, placed.plan, ideal_estimate, on_nodes, techniques),
        whole_cluster=_whole_cluster(spec, inventory, cost_model, objective, techniques),
    )


def inventory_of(
    spec: ParallelTrainingJobSpec,
    nodes: Sequence[dict[str, Any]],
    pods: Sequence[dict[str, Any]],
    site: SiteFabric,
) -> Inventory:
    """The nodes as a job sees them."""
    workers = spec.workers
    return Inventory.from_objects(
        nodes,
        pods,
        gpu_resource=workers.gpu_resource,
        node_selector=workers.node_selector,
        tolerations=workers.tolerations,
        site=site,
        channel=spec.has_channel,
        pods_joined=spec.joins_pods,
    )


def _nodes_to_free(plan: Plan, inventory: Inventory) -> str:
    found = nodes_to_free(plan, inventory)
    if found is None:
        return ""
    more = f" and {len(found.nodes) - MAX_NAMED} more" if len(found.nodes) > MAX_NAMED else ""
    return f"Freeing {', '.join(found.nodes[:MAX_NAMED])}{more} ({count_gpus(found.gpus)} in use) would be enough"


def _fragmentation_cost(placement: Placement, inventory: Inventory, cost_model: CostModel | None) -> float:
    plan = placement.plan
    if cost_model is None:
        return cost_of_fragmentation(placement, inventory)
    weights = weights_for(cost_model, plan.strategy, plan.gpus_per_worker, inventory.levels, inventory.site)
    return cost_of_fragmentation(placement, inventory, PlacingOptions(weights, effort=QUICK_EFFORT))


def _lost(
    spec: ParallelTrainingJobSpec, plan: Plan, ideal_estimate: Estimate, cost_model: CostModel, techniques: Techniques
) -> tuple[RejectedAlternative, ...]:
    """The alternatives to the plan. Like `ideal_estimate`, they are estimated without a placement."""
    chosen = Candidate(
        plan.strategy,
        ideal_estimate,
        cost_model.machine.gpu.node,
    )
    request = pinned_request(spec, cost_model.job, cost_model.machine, techniques=techniques)
    return alternatives_of(request, chosen)


def _whole_cluster(
    spec: ParallelTrainingJobSpec,
    inventory: Inventory,
    cost_model: CostModel,
    objective: Objective,
    techniques: Techniques,
) -> SearchResult | None:
    """The best layout on all nodes. None if nothing fits.

    Where NVLink ends at each pod, tensor-parallel groups span several pods of a host only if that is clearly better.
    """
    request = search_request(spec, cost_model, _gpus_of_workers(spec, inventory), objective, techniques)
    found = _found(request)
    limits = ClusterLimits.of(inventory, spec.workers.gpus_per_worker)
    if not limits.pods_apart:
        return found
    across = _found(replace(request, max_tensor=limits.domain_gpus))
    if found is None or across is None:
        return found or across
    better = across.best.score(objective) * TIE_TOLERANCE < found.best.score(objective)
    return across if better else found


def _found(request: SearchRequest) -> SearchResult | None:
    try:
        return search(request)
    except NothingFitsError:
        return None


def _gpus_of_workers(spec: ParallelTrainingJobSpec, inventory: Inventory) -> int:
    each = spec.workers.gpus_per_worker
    return sum(node.capacity.gpus // each * each for node in inventory.usable)
