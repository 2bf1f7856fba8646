"""The exact cost of a placement: each further location that a group of ranks touches, at each level of the fabric.

This cost approximates communication time: the sum over groups of (locations - 1), weighted by the group's traffic and
the cost of the level's links. Tensor-parallel groups have no weight: they must not cross locations, unless a job
explicitly allows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.planner.placement.rank_blocks import Dimension, RankBlocks
from meshwright.planner.placement.weights import Weights
from meshwright.planner.plan import Plan
from meshwright.planner.topology.location import Location


@dataclass(frozen=True, slots=True)
class CrossingCosts:
    """The cost of a placement, and how many groups cross locations.

    Attributes:
        cost: weighted crossings; lower is better.
        straddling_tensor_groups: tensor-parallel groups in more than one NVLink domain.
        straddling_replicas: replicas in more than one rack.
        extra_places: number of locations beyond the first, summed over a dimension's groups, by dimension and level.
    """

    cost: float
    straddling_tensor_groups: int
    straddling_replicas: int
    extra_places: Mapping[Dimension, Mapping[str, int]] = field(default_factory=dict)


def crossings(
    plan: Plan, places: Mapping[int, Location], weights: Weights | None = None, mesh: RankBlocks | None = None
) -> CrossingCosts:
    """Count crossings. `places` has each worker's location. Without `mesh` the groups are those of the layout."""
    mesh = mesh or RankBlocks.of(plan.layout, plan.gpus_per_worker)
    level_weights = weights or Weights()
    levels = places[0].levels if places else ()
    at = [_places_of_blocks(mesh, [places[w].names[i] for w in range(len(places))]) for i in range(len(levels))]
    extra: dict[Dimension, dict[str, int]] = {}
    cost = 0.0
    for group in mesh.groups():
        counts = extra.setdefault(group.dimension, dict.fromkeys(levels, 0))
        for level, of_block in zip(levels, at, strict=True):
            extra_count = len(set().union(*map(of_block.__getitem__, group.blocks))) - 1
            counts[level] += extra_count * group.count
            cost += extra_count * group.count * level_weights.of(group.dimension, level)
    domains = [places[w].domain for w in range(len(places))]
    racks = [places[w].rack for w in range(len(places))]
    return CrossingCosts(
        cost=cost,
        straddling_tensor_groups=_straddling(domains, mesh.gpus_per_worker, mesh.tensor),
        straddling_replicas=_straddling(racks, mesh.gpus_per_worker, mesh.tensor * mesh.context * mesh.pipeline),
        extra_places=extra,
    )


def _places_of_blocks(mesh: RankBlocks, names: Sequence[str]) -> list[frozenset[str]]:
    """The locations of each block's workers: one, unless another scheduler split a tensor-parallel group."""
    size = mesh.block_workers
    if size == 1:
        single = {name: frozenset((name,)) for name in names}
        return [single[name] for name in names]
    return [frozenset(names[first : first + size]) for first in range(0, len(names), size)]


def _straddling(names: Sequence[str], gpus_per_worker: int, group: int) -> int:
    """Number of groups of `group` consecutive ranks that touch workers with different names."""
    if group <= gpus_per_worker and gpus_per_worker % group == 0:
        return 0
    total = len(names) * gpus_per_worker
    count = 0
    for first in range(0, total, group):
        worker_names = names[first // gpus_per_worker : -(-(first + group) // gpus_per_worker)]
        count += len(set(worker_names)) > 1
    return count
