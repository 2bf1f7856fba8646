"""What a placement costs: weighted crossings of fabric levels by the groups that communicate.

The surrogate of a time model: sum over replicas of (places - 1) for pipeline traffic, sum over stages of
(places - 1) for gradients between replicas, each level weighted. Tensor-parallel groups have no weight: they may not
cross at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshwright.planner.plan import Plan
from meshwright.planner.topology import Place

PIPELINE_DOMAIN = 1.0
PIPELINE_RACK = 4.0
PIPELINE_ZONE = 16.0
DATA_RACK = 1.0
"""Replicas meet once a step and overlap with compute; inside a rack they cost nothing extra."""
DATA_ZONE = 4.0


@dataclass(frozen=True, slots=True)
class Crossings:
    """The cost of a placement and the groups that straddle."""

    cost: float
    straddling_tensor_groups: int
    straddling_replicas: int


def crossings(plan: Plan, places: Mapping[int, Place]) -> Crossings:
    """Counts crossings; `places` says where each worker is."""
    layout, size = plan.layout, plan.gpus_per_worker
    replicas: defaultdict[int, set[Place]] = defaultdict(set)
    stages: defaultdict[int, set[Place]] = defaultdict(set)
    groups: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
    for worker, ranks in enumerate(plan.workers):
        place = places[worker]
        # A worker changes coordinates only at multiples of the tensor degree (or holds part of one group).
        for rank in range(ranks.start, ranks.stop, min(size, layout.tensor)):
            at = layout.coordinates(rank)
            replicas[at.data].add(place)
            stages[at.pipeline].add(place)
            groups[at.data, at.pipeline].add(place.domain)
    cost = sum(
        PIPELINE_DOMAIN * _extra(p.domain for p in inside)
        + PIPELINE_RACK * _extra(p.rack for p in inside)
        + PIPELINE_ZONE * _extra(p.zone for p in inside)
        for inside in replicas.values()
    ) + sum(
        DATA_RACK * _extra(p.rack for p in across) + DATA_ZONE * _extra(p.zone for p in across)
        for across in stages.values()
    )
    return Crossings(
        cost=cost,
        straddling_tensor_groups=sum(1 for domains in groups.values() if len(domains) > 1),
        straddling_replicas=sum(1 for inside in replicas.values() if _extra(p.rack for p in inside)),
    )


def _extra(names: Iterable[str]) -> int:
    return len(set(names)) - 1
