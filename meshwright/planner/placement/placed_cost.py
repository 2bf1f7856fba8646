"""Estimates the cost of a plan on the nodes where it was placed: the spans that its groups have there.

A plan is first estimated as if ranks filled domains in order. On a fragmented cluster they do not: a replica may leave
its rack, or a ring may have one rank in a domain where the estimate assumed eight. Two plans with similar estimates can
differ much on the real nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from meshwright.api.status import PlacementStatus, in_rank_order
from meshwright.layout import Layout
from meshwright.planner.cost.comm_groups import GroupSpans
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.cost.fabric import Fabric, Span
from meshwright.planner.cost_model import CostModel
from meshwright.planner.placement.objective import nvlink_domains
from meshwright.planner.placement.result import Placement
from meshwright.planner.topology.levels import DOMAIN, RACK
from meshwright.planner.topology.location import Location


def estimate_placed(placement: Placement, cost_model: CostModel) -> Estimate:
    """Estimate memory and time of the placement's plan on its nodes."""
    groups = spans_of_placement(placement, cost_model.machine.fabric)
    return cost_model.estimate(placement.plan.strategy, groups)


def spans_of_placement(placement: Placement, fabric: Fabric) -> GroupSpans:
    """The group spans of the placement's plan on its nodes."""
    plan = placement.plan
    domains = nvlink_domains(placement.nodes, placement.places, joined=placement.joined)
    places = _with_pods_as_domains(placement.places, domains)
    return placed_group_spans(plan.layout, plan.gpus_per_worker, places, fabric)


def group_spans_of_status(
    layout: Layout, gpus_per_worker: int, placement: PlacementStatus | None, fabric: Fabric, *, joined: bool
) -> GroupSpans | None:
    """The group spans of a running job from its status. None if the status does not have enough information.

    `joined`: whether a claim joins the pods of one host.
    """
    entries = in_rank_order(placement.workers) if placement is not None else []
    places = {
        plan_worker: Location((entry.domain, entry.rack), (DOMAIN, RACK)) for plan_worker, entry in enumerate(entries)
    }
    if not places or len(places) * gpus_per_worker != layout.world_size:
        return None
    if not all(place.domain for place in places.values()):
        return None
    nodes = {plan_worker: entry.node for plan_worker, entry in enumerate(entries)}
    places = _with_pods_as_domains(places, nvlink_domains(nodes, places, joined=joined))
    return placed_group_spans(layout, gpus_per_worker, places, fabric)


def placed_group_spans(
    layout: Layout, gpus_per_worker: int, places: Mapping[int, Location], fabric: Fabric
) -> GroupSpans:
    """The spans of the worst group of each dimension.

    Args:
        layout: the degrees.
        gpus_per_worker: number of consecutive ranks on one worker.
        places: worker index -> location.
        fabric: the levels: the NVLink domain, the rack if the fabric has three levels, and the entire cluster.
    """
    names = [_place_names(places[worker], len(fabric.levels)) for worker in range(len(places))]
    at = [names[rank // gpus_per_worker] for rank in range(layout.world_size)]
    tensor, context, pipeline, data = layout.tensor, layout.context, layout.pipeline, layout.data
    stage = tensor * context
    replica = stage * pipeline
    tensor_groups = [range(first, first + tensor) for first in range(0, layout.world_size, tensor)]
    pipeline_groups = [range(d * replica, d * replica + replica, stage) for d in range(data)]
    context_groups = [range(first, first + stage, tensor) for first in range(0, layout.world_size, stage)]
    shard_groups = [
        [d * replica + p * stage + c * tensor for d in range(data) for c in range(context)] for p in range(pipeline)
    ]
    single_rank = Span.of(1, 1, fabric)
    shard_span = _span(shard_groups, at, fabric)
    experts_spread = layout.expert > 1
    return GroupSpans(
        tensor=_span(tensor_groups, at, fabric),
        context=_span(context_groups, at, fabric),
        expert=_span(layout.expert_groups(), at, fabric) if experts_spread else single_rank,
        shard_ranks=shard_span,
        expert_shard_ranks=_span(layout.expert_shard_groups(), at, fabric) if experts_spread else shard_span,
        pipeline_level=_widest_stage_gap(pipeline_groups, at, fabric),
        pipeline=_span(pipeline_groups, at, fabric),
    )


def _with_pods_as_domains(places: Mapping[int, Location], domains: Mapping[int, str]) -> dict[int, Location]:
    """The locations with other names of NVLink domains. Levels besides domain and rack are left out."""
    return {worker: Location((domains[worker], place.rack), (DOMAIN, RACK)) for worker, place in places.items()}


def _place_names(place: Location, levels: int) -> tuple[str, ...]:
    """The location at each level of the fabric. The last level is the entire cluster."""
    inner = (place.domain, place.rack)[: levels - 1]
    return (*inner, *([""] * (levels - len(inner))))


def _span(groups: Iterable[Sequence[int]], at: list[tuple[str, ...]], fabric: Fabric) -> Span:
    """The span of the group with the fewest ranks per location, level by level. This location limits a ring's speed."""
    members, size = [1 << 30] * len(fabric.levels), 1
    for group in groups:
        size = len(group)
        for level in range(len(fabric.levels)):
            fewest = min(Counter(at[rank][level] for rank in group).values())
            members[level] = min(members[level], fewest)
    members[-1] = size
    return Span(tuple(members))


def _widest_stage_gap(pipeline_groups: Iterable[range], at: list[tuple[str, ...]], fabric: Fabric) -> int:
    """The closest level that the worst pair of neighboring stages shares."""
    widest = 0
    for pipe in pipeline_groups:
        for one, other in zip(pipe, pipe[1:], strict=False):
            shared_level = next(i for i in range(len(fabric.levels)) if at[one][i] == at[other][i])
            widest = max(widest, shared_level)
    return widest
