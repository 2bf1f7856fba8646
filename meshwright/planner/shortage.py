"""Saying why a plan does not fit: what is short, by how much, what was not counted, and what would fit now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.inventory import Inventory
from meshwright.planner.plan import Plan
from meshwright.planner.pods import Amount
from meshwright.planner.room import Room, Shape, too_small

_NAMED = 8


def shortage(plan: Plan, inventory: Inventory, kept: Mapping[int, str], blocked: int) -> DoesNotFitError:
    """The error for a plan that does not fit.

    Args:
        plan: the plan.
        inventory: the nodes it was to be placed on.
        kept: the workers that stay where they are.
        blocked: workers that must join kept ones of their tensor-parallel group and cannot.
    """
    shape = Shape(plan)
    room, whole = Room(plan, inventory, kept), Room(plan, inventory, {})
    needed = shape.workers - len(kept)
    found = room.total_blocks() * shape.block_workers
    short = blocked or max(1, needed - found)
    fitting = _replicas_that_fit(plan, whole.total_blocks() * shape.block_workers)
    parts = [
        _needs(plan, needed, len(kept), shape),
        f"room for {found}{_by_rack(room, shape)}",
        f"short by {_workers(short)} ({short * plan.gpus_per_worker} GPUs)",
        *_other_resources(plan, inventory, needed, found),
        *_left_out(plan, inventory),
        f"replicas: {fitting} would fit now" if fitting else "not even one replica would fit now",
    ]
    because_of_kept = bool(kept) and whole.total_blocks() >= shape.blocks
    if because_of_kept:
        parts.append("all workers placed anew would fit")
    return DoesNotFitError(
        "; ".join(parts), short_workers=short, replicas_that_fit=fitting, because_of_kept=because_of_kept
    )


def _workers(count: int) -> str:
    return f"{count} worker" if count == 1 else f"{count} workers"


def _needs(plan: Plan, needed: int, kept: int, shape: Shape) -> str:
    text = f"needs {_workers(needed)} of {plan.gpus_per_worker} GPUs"
    if kept:
        text += f" beside the {kept} that run"
    if shape.block_workers > 1:
        text += f" (each {shape.block_workers} of a tensor-parallel group in one NVLink domain)"
    return text


def _by_rack(room: Room, shape: Shape) -> str:
    counts = [(rack, room.rack_blocks(rack) * shape.block_workers) for rack in room.all_racks]
    counts = sorted(((rack, count) for rack, count in counts if count), key=lambda pair: (-pair[1], pair[0]))
    if not counts:
        return ""
    more = f" and {len(counts) - _NAMED} more racks" if len(counts) > _NAMED else ""
    return ": " + ", ".join(f"{rack} {count}" for rack, count in counts[:_NAMED]) + more


def _other_resources(plan: Plan, inventory: Inventory, needed: int, found: int) -> list[str]:
    """A hint when GPUs are free but CPU, memory or pod slots are not."""
    only_gpus = replace(plan, worker_request=Amount(gpus=plan.gpus_per_worker))
    shape = Shape(plan)
    by_gpus = Room(only_gpus, inventory, {}).total_blocks() * shape.block_workers
    if by_gpus <= found or found >= needed:
        return []
    return [f"by GPUs alone there is room for {by_gpus}: CPU, memory or pod slots are short, see `workers.resources`"]


def _left_out(plan: Plan, inventory: Inventory) -> list[str]:
    reasons = dict(inventory.unusable)
    reasons |= {node.name: too_small(plan, node) for node in inventory.usable if too_small(plan, node)}
    if not reasons:
        return []
    named = ", ".join(f"{name} ({reasons[name]})" for name in sorted(reasons)[:3])
    if len(reasons) <= 3:
        return [f"not counted: {named}"]
    commonest = ", ".join(f"{count} {reason}" for reason, count in Counter(reasons.values()).most_common(3))
    return [f"not counted: {len(reasons)} nodes ({commonest})"]


def _replicas_that_fit(plan: Plan, workers: int) -> int:
    for replicas in range(plan.layout.data - 1, 0, -1):
        needed = replicas * plan.layout.replica_size // plan.gpus_per_worker
        if needed <= workers and plan.allows_replicas(replicas):
            return replicas
    return 0
