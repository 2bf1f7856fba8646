"""Maps ranks to nodes after another scheduler chose the nodes, or when the number of replicas changes.

No worker moves that can stay. A rank's shard depends only on its coordinates in the mesh, and data-parallel replicas
are interchangeable: a replica that takes another index keeps its nodes and its state.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace

from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.placement.capacity import GangShape
from meshwright.planner.placement.options import PlacingOptions
from meshwright.planner.placement.place import place
from meshwright.planner.placement.result import Placement
from meshwright.planner.plan import Plan

_DEFAULT = PlacingOptions()


def remap_ranks(
    plan: Plan,
    inventory: Inventory,
    given: Mapping[int, str],
    options: PlacingOptions = _DEFAULT,
    keep: Collection[int] = (),
) -> Placement:
    """Find the best mapping of ranks onto the nodes that another scheduler (Kueue, Volcano, KAI) chose.

    The number of workers on each node stays the same, but the assignment of workers to them is chosen again. The given
    mapping is one of the candidates. If a tensor-parallel group cannot stay inside an NVLink domain, the closest
    possible level is used, and a note of the placement says so.

    Args:
        plan: what runs.
        inventory: the locations of the nodes. Their free capacity does not matter.
        given: worker index -> node, for every worker.
        options: weights and effort.
        keep: running workers that stay on their nodes.

    Raises:
        ValueError: a worker has no node, or its node is not in the inventory.
    """
    workers = range(GangShape(plan).workers)
    lost = [worker for worker in workers if given.get(worker) not in inventory.nodes]
    if lost:
        raise ValueError(f"workers {lost[:8]} were given no node of this cluster: wait until all of them are scheduled")
    counts = Counter(given[worker] for worker in workers)
    nodes = {
        name: replace(inventory.nodes[name], free=plan.worker_request * count, gpu_memory_bytes=None, unusable="")
        for name, count in counts.items()
    }
    given_nodes = replace(inventory, nodes=nodes)
    kept_workers = {worker: given[worker] for worker in keep}
    levels = inventory.levels[inventory.levels.index(options.tensor_within) :]
    for level in levels:
        try:
            return place(plan, given_nodes, kept_workers, replace(options, tensor_within=level), previous=given)
        except DoesNotFitError:
            continue
    return place(plan, given_nodes, keep=dict(given), options=options)


def map_ranks(
    plan: Plan,
    inventory: Inventory,
    pods: Mapping[int, str],
    stay: Mapping[int, int],
    options: PlacingOptions = _DEFAULT,
) -> tuple[Placement, dict[int, int]]:
    """Choose the ranks of each pod, if another scheduler chose the nodes of the pods.

    Args:
        plan: what runs.
        inventory: the locations of the nodes.
        pods: pod's index -> node, for as many pods as the plan has workers.
        stay: pod's index -> worker of the plan, for the pods that keep running as this worker.
        options: weights and effort.

    Returns:
        The placement of the plan's workers, and pod's index -> worker of the plan. A pod becomes the worker with its
            own index if the cost is the same.

    Raises:
        ValueError: as `remap_ranks`.
    """
    plan_workers = dict(stay)
    taken = set(stay.values())
    plan_workers |= {pod: pod for pod in pods if pod not in plan_workers and pod not in taken}
    free_plan_workers = iter(sorted(set(range(len(pods))) - set(plan_workers.values())))
    plan_workers |= {pod: next(free_plan_workers) for pod in sorted(pods) if pod not in plan_workers}
    given = {plan_worker: pods[pod] for pod, plan_worker in plan_workers.items() if pod in pods}
    placement = remap_ranks(plan, inventory, given, options, taken)
    fixed = {pod: plan_worker for pod, plan_worker in plan_workers.items() if placement.nodes[plan_worker] == pods[pod]}
    free: defaultdict[str, list[int]] = defaultdict(list)
    for plan_worker in sorted(set(plan_workers.values()) - set(fixed.values()), reverse=True):
        free[placement.nodes[plan_worker]].append(plan_worker)
    return placement, fixed | {pod: free[pods[pod]].pop() for pod in sorted(pods) if pod not in fixed}


def keep_on_resize(
    old: Plan, new: Plan, nodes: Mapping[int, str], lost: frozenset[str] = frozenset()
) -> dict[int, str]:
    """The workers that stay on their nodes when the number of replicas changes: `keep` for `place`.

    Complete replicas whose index still exists stay. If a replica has lost a node, a complete replica that would be
    removed takes its index. If there is none, the remaining workers of the replica stay.

    Args:
        old: the previous plan.
        new: the next plan, with the same degrees except data parallelism.
        nodes: worker of the old plan -> its node.
        lost: nodes that no longer exist.

    Returns:
        Worker of the new plan -> node. Empty if the degrees differ, because every rank then has other shards.
    """
    old_degrees = (old.layout.tensor, old.layout.pipeline, old.gpus_per_worker)
    if old_degrees != (new.layout.tensor, new.layout.pipeline, new.gpus_per_worker):
        return {}
    before, after = GangShape(old), GangShape(new)
    size = before.segment_blocks * before.block_workers

    def surviving_workers(segment: int) -> dict[int, str]:
        workers_at = {w - segment * size: nodes.get(w, "") for w in range(segment * size, (segment + 1) * size)}
        return {offset: node for offset, node in workers_at.items() if node and node not in lost}

    healthy = [s for s in range(before.segments) if len(surviving_workers(s)) == size]
    surplus = [segment for segment in healthy if segment >= after.segments]
    keep: dict[int, str] = {}
    for segment in range(min(before.segments, after.segments)):
        workers_at = surviving_workers(segment)
        if len(workers_at) < size and surplus:
            workers_at = surviving_workers(surplus.pop(0))
        keep |= {segment * size + offset: node for offset, node in workers_at.items()}
    return keep
