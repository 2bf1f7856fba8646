"""Clusters for placement benchmarks, and the two timed questions: a job on 100,000 GPUs, and one lost node of 2,048."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from meshwright.planner.cluster.inventory import Inventory, Node
from meshwright.planner.cluster.pod_resources import Resources
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.placement import Placement, PlacingOptions, place
from meshwright.planner.plan import Plan
from meshwright.planner.topology import Location

NODE_GPUS = 8
LEVELS = ("domain", "rack", "spine")


def cluster(racks: Sequence[int], spine_racks: int = 16, names: random.Random | None = None) -> Inventory:
    """Nodes of 8 free GPUs: so many in each rack; so many racks under a spine.

    With `names` the nodes' names say nothing about where they are, as in most clouds.
    """
    nodes: dict[str, Node] = {}
    total = sum(racks)
    numbers = list(range(total))
    if names is not None:
        names.shuffle(numbers)
    for rack, count in enumerate(racks):
        for _ in range(count):
            name = f"node-{numbers[len(nodes)]:06d}"
            path = (f"host/{name}", f"rack{rack:04d}", f"spine{rack // spine_racks:03d}")
            room = Resources(gpus=NODE_GPUS, pods=100)
            nodes[name] = Node(name, Location(path, LEVELS), room, room)
    return Inventory(nodes, (), LEVELS)


def fragmented(nodes: int, rack_nodes: int, taken: float, seed: int) -> list[int]:
    """Free nodes of each rack when other jobs hold a part of them: whole nodes, unevenly."""
    draw = random.Random(seed)
    racks = [rack_nodes] * (nodes // rack_nodes) + ([nodes % rack_nodes] if nodes % rack_nodes else [])
    return [sum(draw.random() >= taken * draw.choice((0.0, 1.0, 2.0)) for _ in range(size)) for size in racks]


def plan_of(pipeline: int, data: int, tensor: int = NODE_GPUS) -> Plan:
    """A plan whose workers are whole nodes."""
    return Plan(Strategy(tensor, pipeline, data), NODE_GPUS, Resources(gpus=NODE_GPUS, pods=1))


def placed_100k() -> tuple[Placement, float]:
    """A job of 8 x 16 x 700 GPUs on 12,500 nodes, about a tenth of them taken; and the seconds it took."""
    inventory = cluster(fragmented(12_500, 32, 0.08, seed=1), names=random.Random(1))
    started = time.perf_counter()
    placement = place(plan_of(16, 700), inventory)
    return placement, time.perf_counter() - started


def place_100k() -> float:
    """Seconds to place a job on 100,000 GPUs in 12,500 nodes."""
    return placed_100k()[1]


def replace_node(repeats: int = 5) -> float:
    """Milliseconds to place anew what one lost node of 2,048 held, everything else staying; the median of runs."""
    inventory = cluster([32] * 64, names=random.Random(1))
    plan = plan_of(8, 255)
    nodes = place(plan, inventory, options=PlacingOptions(effort=0)).nodes
    times: list[float] = []
    for lost in range(0, repeats * 100, 100):
        left = {name: node for name, node in inventory.nodes.items() if name != nodes[lost]}
        keep = {worker: node for worker, node in nodes.items() if worker != lost}
        smaller = Inventory(left, (), LEVELS)
        started = time.perf_counter()
        found = place(plan, smaller, keep)
        times.append(1000 * (time.perf_counter() - started))
        if keep.items() - found.nodes.items():
            raise RuntimeError("a worker moved that lost nothing")
    return sorted(times)[len(times) // 2]
