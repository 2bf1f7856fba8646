"""The exact cost of a placement: each further location that a group of ranks touches, at each level of the fabric.

This cost approximates communication time: the sum over groups of (locations - 1), weighted by the group's traffic and
the cost of the level's links. Tensor-parallel groups have no weight: they must not cross locations, unless a job
explicitly allows it.
"""

from __future__ import annotations

from collections import Counter
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


def nvlink_domains(nodes: Mapping[int, str], places: Mapping[int, Location], *, joined: bool) -> dict[int, str]:
    """The NVLink domain of each worker: that of its node, or a separate one if workers share the node.

    NCCL takes pods of one host for different hosts: their GPUs communicate over the network, unless a claim joins them.

    Args:
        nodes: worker -> node.
        places: worker -> location of its node.
        joined: whether a claim joins the pods of one host.
    """
    pods = Counter(nodes.values())
    return {
        worker: place.domain if joined or pods[nodes[worker]] == 1 else f"{place.domain}/{worker}"
        for worker, place in places.items()
    }


def crossings(
    plan: Plan,
    places: Mapping[int, Location],
    weights: Weights | None = None,
    mesh: RankBlocks | None = None,
    domains: Mapping[int, str] | None = None,
) -> CrossingCosts:
    """Count crossings.

    Args:
        plan: the plan.
        places: each worker's location.
        weights: cost of crossings.
        mesh: the groups. Default: those of the layout.
        domains: each worker's NVLink domain, as tensor-parallel groups are counted. Default: that of its location.
    """
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
    of_worker = [domains[w] if domains is not None else places[w].domain for w in range(len(places))]
    racks = [places[w].rack for w in range(len(places))]
    return CrossingCosts(
        cost=cost,
        straddling_tensor_groups=_straddling(of_worker, mesh.gpus_per_worker, mesh.tensor),
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
