"""Keeps a job on the parts of the cluster that a queue assigned to its workers, with the number of workers in each.

The placer then chooses nodes as always. What it sees is only what was assigned: the other nodes are unusable, and an
assigned node has no more free GPUs than those of its workers. So exactly one set of nodes remains, and what the placer
chooses is which ranks run on which of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from meshwright.planner.cluster.inventory import Node
from meshwright.planner.cluster.pod_resources import Resources
from meshwright_operator.scheduling.job_queue import PlacementRequest

NOT_ASSIGNED = "the queue assigned other nodes to the job"


def within_domains(
    request: PlacementRequest, nodes: Mapping[str, Node], changed: Mapping[str, Node]
) -> dict[str, Node]:
    """`changed`, and every node as far as the assignment leaves it to the job.

    Args:
        request: The job. Workers that stay count toward the number of their domain.
        nodes: All nodes.
        changed: Nodes that replace those with the same names.
    """
    if not request.domains:
        return dict(changed)
    kept = Counter((request.assigned_nodes or (request.sizes[0].kept if request.sizes else {})).values())
    slots = Counter[str]()
    for domain in request.domains:
        left = domain.workers - sum(count for name, count in kept.items() if name in domain.nodes)
        usable = [node for name in domain.nodes if (node := changed.get(name) or nodes.get(name)) and not node.unusable]
        slots.update(_chosen(usable, request.plan.worker_request, left))
    result = dict(changed)
    for name in nodes:
        node = changed.get(name) or nodes[name]
        if slots[name]:
            gpus = min(node.free.gpus, slots[name] * request.plan.worker_request.gpus)
            result[name] = replace(node, free=replace(node.free, gpus=gpus))
        elif not node.unusable:
            result[name] = replace(node, unusable=NOT_ASSIGNED)
    return result


def _chosen(nodes: list[Node], worker: Resources, count: int) -> dict[str, int]:
    """Node -> how many of the domain's workers it gets: as few nodes as possible, the emptiest ones first."""
    room = {node.name: node.free.fits(worker) for node in nodes}
    chosen: dict[str, int] = {}
    for name in sorted(room, key=lambda name: (-room[name], name)):
        if count <= 0 or not room[name]:
            break
        chosen[name] = min(count, room[name])
        count -= chosen[name]
    return chosen
