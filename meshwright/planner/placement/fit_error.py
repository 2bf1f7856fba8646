"""Explains why a plan does not fit: what is missing, which nodes are excluded, and how many replicas fit now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cluster.limits import excluded_nodes
from meshwright.planner.cluster.pod_resources import Resources
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.placement.capacity import FreeCapacity, GangShape, why_too_small
from meshwright.planner.placement.group_levels import GroupLevels, with_nodes_as_level
from meshwright.planner.placement.nested_capacity import LevelShortage, NestedCapacity
from meshwright.planner.plan import Plan
from meshwright.planner.topology.levels import DOMAIN

_MAX_NAMED = 8


def fits(plan: Plan, inventory: Inventory, kept: Mapping[int, str] | None = None) -> bool:
    """Whether a placement of the plan exists that meets its required levels. Exact."""
    levels = GroupLevels.of(plan, inventory.levels)
    if levels.names_nodes:
        inventory = with_nodes_as_level(inventory)
    shape, kept = GangShape(plan), kept or {}
    capacity = FreeCapacity(plan, inventory, kept, levels.base)
    first = shape.block_workers
    fixed = {
        block: inventory.nodes[kept[block * first]].place
        for block in range(shape.blocks)
        if kept.get(block * first) in inventory.nodes
    }
    if shape.blocks - len(fixed) > capacity.total_blocks():
        return False
    return not levels.required or NestedCapacity(shape.blocks, levels.required, capacity, fixed).fits


def fit_error(
    plan: Plan,
    inventory: Inventory,
    kept: Mapping[int, str],
    blocked: int,
    levels: GroupLevels | None = None,
    shortage: LevelShortage | None = None,
) -> DoesNotFitError:
    """Return the error for a plan that does not fit.

    Args:
        plan: the plan.
        inventory: the nodes.
        kept: the workers that stay on their nodes: worker index -> node.
        blocked: number of workers that must be in the NVLink domain of a worker that stays, and do not fit there.
        levels: the levels that groups must not leave.
        shortage: the required level for which it does not fit, if there is enough capacity otherwise.
    """
    levels = levels or GroupLevels.of(plan, inventory.levels)
    shape = GangShape(plan)
    capacity = FreeCapacity(plan, inventory, kept, levels.base)
    needed = shape.workers - len(kept)
    workers_that_fit = capacity.total_blocks() * shape.block_workers
    short = blocked or max(1, needed - workers_that_fit)
    replicas_fitting = _replicas_that_fit(plan, inventory, levels)
    missing_gpus = _gpus(short * plan.gpus_per_worker)
    # More workers may fit in other domains than in those of the workers that stay.
    fitting = _fitting(plan, min(workers_that_fit, needed - short), needed, len(kept))
    if shortage is not None:
        sentences = [_level_sentence(plan, shape, shortage), *_never_fits(plan, inventory, shortage)]
        free = "Free more GPUs there, or set a wider level"
    else:
        sentences = [f"{fitting}{_per_rack(capacity, shape)}: {missing_gpus} missing", *_groups(shape, levels)]
        free = f"Free {missing_gpus}"
    sentences += [
        *(_other_resources(plan, inventory, kept, levels, workers_that_fit) if shortage is None else ()),
        *_skipped_nodes(plan, inventory),
        f"{free}, or set {_size_to_set(plan, replicas_fitting)} to start now"
        if replicas_fitting
        else "No smaller number of replicas fits now",
    ]
    blocked_by_kept_workers = bool(kept) and fits(plan, inventory)
    if blocked_by_kept_workers:
        sentences.append("It would fit if all workers were placed again")
    return DoesNotFitError(
        ". ".join(sentences),
        unplaced_workers=short,
        replicas_that_fit=replicas_fitting,
        blocked_by_kept_workers=blocked_by_kept_workers,
    )


def _level_sentence(plan: Plan, shape: GangShape, shortage: LevelShortage) -> str:
    """Which required level is not met, and what would be needed."""
    rule = shortage.rules[0]
    workers = shortage.unit_blocks * shape.block_workers
    need = (
        f"{workers} workers with {_gpus(plan.gpus_per_worker)} each in one {_LEVEL_NAMES.get(rule.level, rule.level)}"
    )
    names = ", ".join(f"`topology.{one.dimension}.required: {one.stated}`" for one in shortage.rules)
    verb = "needs" if len(shortage.rules) == 1 else "need"
    if rule.level != rule.stated:
        names += f" (no node has a label of this level, so `{rule.level}` counts)"
    if shortage.units == 1:
        most = shortage.largest * shape.block_workers
        return f"{names} {verb} {need}: the most that fit in one are {most}"
    return f"{names} {verb} {shortage.units} times {need}: {shortage.fitting} of these fit"


def _never_fits(plan: Plan, inventory: Inventory, shortage: LevelShortage) -> list[str]:
    """A remark if the level could not be met without other pods either."""
    emptied = {name: replace(node, free=node.capacity) for name, node in inventory.nodes.items()}
    if fits(plan, replace(inventory, nodes=emptied)):
        return []
    names = " or ".join(f"`topology.{one.dimension}.required`" for one in shortage.rules)
    return [f"It would not fit on the empty nodes either: set {names} to a wider level, or lower the degree"]


_LEVEL_NAMES = {DOMAIN: "NVLink domain"}


def _size_to_set(plan: Plan, replicas: int) -> str:
    """The field for this number of replicas."""
    if plan.gpus is None:
        return f"`spec.replicas: {replicas}`"
    return f"`spec.gpus: {replicas * plan.layout.replica_size}`"


def _gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def _fitting(plan: Plan, fitting: int, needed: int, kept: int) -> str:
    gpus = _gpus(plan.gpus_per_worker)
    workers = f"1 worker with {gpus} fits" if needed == 1 else f"{needed} workers with {gpus} each fit"
    return f"{fitting} of {workers}{f' next to the {kept} that run' if kept else ''}"


def _groups(shape: GangShape, levels: GroupLevels) -> list[str]:
    if shape.block_workers == 1:
        return []
    location = _LEVEL_NAMES.get(levels.base, levels.base)
    return [f"Each tensor-parallel group needs {shape.block_workers} workers in one {location}"]


def _per_rack(capacity: FreeCapacity, shape: GangShape) -> str:
    counts = [(rack, capacity.rack_blocks(rack) * shape.block_workers) for rack in capacity.all_racks]
    counts = sorted(((rack, count) for rack, count in counts if count), key=lambda pair: (-pair[1], pair[0]))
    if not counts:
        return ""
    more = f" and {len(counts) - _MAX_NAMED} more racks" if len(counts) > _MAX_NAMED else ""
    return f" ({', '.join(f'{_rack_name(rack)}: {count}' for rack, count in counts[:_MAX_NAMED])}{more})"


def _rack_name(rack: str) -> str:
    """The rack's label, or without one, the name of the domain or the node that counts as a rack (see `locate`)."""
    return rack.rpartition("/")[2]


def _other_resources(
    plan: Plan, inventory: Inventory, kept: Mapping[int, str], levels: GroupLevels, workers_that_fit: int
) -> list[str]:
    """A hint if GPUs are free but another resource, such as CPU, memory or a network device, is not."""
    only_gpus = replace(plan, worker_request=Resources(gpus=plan.gpus_per_worker))
    shape = GangShape(plan)
    # The inventory has the GPUs of the workers that stay as free ones.
    by_gpus = FreeCapacity(only_gpus, inventory, kept, levels.base).total_blocks() * shape.block_workers
    if by_gpus <= workers_that_fit or workers_that_fit >= shape.workers - len(kept):
        return []
    request = plan.worker_request
    nodes = [node for node in inventory.usable if node.free.gpus >= request.gpus]
    short = Counter(name for node in nodes for name in node.free.short_of(request * (node.free.gpus // request.gpus)))
    missing = "; ".join(
        f"{count} node{'s'[: count > 1]} with too little {name}" for name, count in short.most_common(3)
    )
    return [f"Counting only GPUs, {by_gpus} workers fit: {missing}, see `workers.resources`"]


def _skipped_nodes(plan: Plan, inventory: Inventory) -> list[str]:
    reasons = dict(inventory.excluded)
    reasons |= {node.name: why_too_small(plan, node) for node in inventory.usable if why_too_small(plan, node)}
    text = excluded_nodes(reasons)
    return [text] if text else []


def _replicas_that_fit(plan: Plan, inventory: Inventory, levels: GroupLevels) -> int:
    shape = GangShape(plan)
    workers = FreeCapacity(plan, inventory, {}, levels.base).total_blocks() * shape.block_workers
    for replicas in range(plan.layout.data - 1, 0, -1):
        needed = replicas * plan.layout.replica_size // plan.gpus_per_worker
        if needed > workers or not plan.allows_replicas(replicas):
            continue
        smaller = replace(plan, strategy=replace(plan.strategy, data=replicas))
        if not levels.required or fits(smaller, inventory):
            return replicas
    return 0
