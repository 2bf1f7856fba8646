"""How many GPUs are free, allocated and unusable, and the largest free block at each level of the fabric. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.planner.cluster.inventory import Inventory

NODE, CLUSTER = "node", "cluster"
"""The levels below and above those of the fabric."""


@dataclass(frozen=True, slots=True)
class GpuCapacity:
    """The GPUs of one extended resource."""

    free: int = 0
    """On usable nodes, and not requested by a pod."""
    allocated: int = 0
    """Requested by pods, on any node."""
    unusable: int = 0
    """Not requested, on nodes that accept no pods."""
    largest_free: Mapping[str, int] = field(default_factory=dict)
    """Level -> the most free GPUs in one location of it."""
    in_partly_used: Mapping[str, int] = field(default_factory=dict)
    """Level -> free GPUs in locations of it in which other GPUs are allocated."""


def gpu_capacity(inventory: Inventory, used: Mapping[str, int]) -> GpuCapacity:
    """Count the GPUs of an inventory without pods, of which pods use `used` (node -> GPUs)."""
    free_at: dict[str, defaultdict[str, int]] = {}
    used_at: dict[str, defaultdict[str, int]] = {}
    levels = (NODE, *inventory.levels, CLUSTER)
    for level in levels:
        free_at[level], used_at[level] = defaultdict(int), defaultdict(int)
    free = allocated = unusable = 0
    for name, node in inventory.nodes.items():
        if not node.capacity.gpus:
            continue
        taken = min(max(0, used.get(name, 0)), node.capacity.gpus)
        allocated += taken
        left = node.capacity.gpus - taken
        if node.unusable:
            unusable += left
            left = 0
        free += left
        places = (name, *(node.place.at(level) for level in inventory.levels), "")
        for level, place in zip(levels, places, strict=True):
            free_at[level][place] += left
            used_at[level][place] += taken
    return GpuCapacity(
        free,
        allocated,
        unusable,
        {level: max(places.values(), default=0) for level, places in free_at.items()},
        {
            level: sum(left for place, left in places.items() if used_at[level][place])
            for level, places in free_at.items()
        },
    )
