"""Ranks and nodes matched again: after another scheduler chose the nodes, and when a job grows or shrinks.

Nothing here moves a worker that may stay. What a rank holds (its shard) is decided by its place in the mesh alone, and
data-parallel replicas are interchangeable: a replica that takes another one's index keeps its nodes and its state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.inventory import Inventory
from meshwright.planner.placement.options import PlacingOptions
from meshwright.planner.placement.place import place
from meshwright.planner.placement.result import Placement
from meshwright.planner.plan import Plan
from meshwright.planner.room import Shape

_DEFAULT = PlacingOptions()


def repair_ranks(
    plan: Plan, inventory: Inventory, given: Mapping[int, str], options: PlacingOptions = _DEFAULT
) -> Placement:
    """The best map of ranks onto the nodes that another scheduler (Kueue, Volcano, KAI) gave the workers.

    Every node keeps as many workers as it was given; which ones is chosen anew, and the given map stays a candidate.
    Where the nodes cannot hold every tensor-parallel group inside an NVLink domain, the closest level that can is
    taken, and the placement's notes say so.

    Args:
        plan: what runs.
        inventory: where the nodes are; what is free on them does not matter, since they were given.
        given: worker index -> node, for every worker.
        options: weights and effort.

    Raises:
        ValueError: a worker was given no node, or a node that is not in the inventory.
    """
    workers = range(Shape(plan).workers)
    lost = [worker for worker in workers if given.get(worker) not in inventory.nodes]
    if lost:
        raise ValueError(f"workers {lost[:8]} were given no node of this cluster: wait until all of them are scheduled")
    counts = Counter(given[worker] for worker in workers)
    nodes = {
        name: replace(inventory.nodes[name], free=plan.worker_request * count, gpu_memory_bytes=None, unusable="")
        for name, count in counts.items()
    }
    only = replace(inventory, nodes=nodes)
    levels = inventory.levels[inventory.levels.index(options.tensor_within) :]
    for level in levels:
        try:
            return place(plan, only, options=replace(options, tensor_within=level), previous=given)
        except DoesNotFitError:
            continue
    return place(plan, only, keep=dict(given), options=options)


def keep_when_resized(
    old: Plan, new: Plan, nodes: Mapping[int, str], lost: frozenset[str] = frozenset()
) -> dict[int, str]:
    """What stays where it is when a job changes its number of replicas: `keep` for `place`.

    Replicas that lost nothing and still have an index stay as they are. An index whose replica lost a node is taken
    over by a healthy replica that would have to go otherwise; where there is none, what is left of it stays.

    Args:
        old: the plan that ran.
        new: the plan that is to run, of the same degrees but for data parallelism.
        nodes: worker of the old plan -> its node.
        lost: nodes that are gone.

    Returns:
        Worker of the new plan -> node. Empty when the degrees differ: then every rank holds other shards.
    """
    same = (old.layout.tensor, old.layout.pipeline, old.gpus_per_worker)
    if same != (new.layout.tensor, new.layout.pipeline, new.gpus_per_worker):
        return {}
    before, after = Shape(old), Shape(new)
    size = before.segment_blocks * before.block_workers

    def left_of(segment: int) -> dict[int, str]:
        held = {w - segment * size: nodes.get(w, "") for w in range(segment * size, (segment + 1) * size)}
        return {offset: node for offset, node in held.items() if node and node not in lost}

    healthy = [s for s in range(before.segments) if len(left_of(s)) == size]
    surplus = [segment for segment in healthy if segment >= after.segments]
    keep: dict[int, str] = {}
    for segment in range(min(before.segments, after.segments)):
        held = left_of(segment)
        if len(held) < size and surplus:
            held = left_of(surplus.pop(0))
        keep |= {segment * size + offset: node for offset, node in held.items()}
    return keep
