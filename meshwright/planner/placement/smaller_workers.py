"""Workers with fewer GPUs, with which a job may fit on what is free now although it does not with its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.plan import Plan
from meshwright.rules.parallelism import MAX_WORKERS


def with_smaller_workers(plan: Plan, inventory: Inventory) -> Iterator[tuple[Plan, int]]:
    """The plan with workers of fewer GPUs, the largest first, and how many GPUs such workers can have at most.

    That number counts free GPUs only, which is fast in a large cluster: less may fit.

    Each worker has complete tensor-parallel groups, which would otherwise communicate between pods in every layer. It
    has complete replicas, or a replica has complete workers. The request of a worker is the same except for its GPUs.
    """
    layout = plan.layout
    nodes_by_free = Counter(max(0, node.free.gpus) for node in inventory.nodes.values() if not node.unusable)
    for gpus in range(plan.gpus_per_worker - 1, 0, -1):
        whole = layout.world_size % gpus == 0 and layout.world_size // gpus <= MAX_WORKERS
        replicas = layout.replica_size % gpus == 0 or gpus % layout.replica_size == 0
        if whole and replicas and gpus % layout.tensor == 0:
            smaller = replace(plan, gpus_per_worker=gpus, worker_request=replace(plan.worker_request, gpus=gpus))
            yield smaller, sum(free // gpus * gpus * nodes for free, nodes in nodes_by_free.items())
