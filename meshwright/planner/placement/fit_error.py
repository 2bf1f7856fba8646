"""Explains why a plan does not fit: what is missing, which nodes are excluded, and what would fit now.

That is the largest number of replicas, and the largest workers with which all replicas fit. If neither helps, both are
changed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cluster.limits import RESERVED, excluded_nodes
from meshwright.planner.cluster.pod_resources import Resources
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.placement.capacity import FreeCapacity, GangShape, why_too_small
from meshwright.planner.placement.group_levels import GroupLevels, with_nodes_as_level
from meshwright.planner.placement.nested_capacity import LevelShortage, NestedCapacity
from meshwright.planner.placement.smaller_workers import with_smaller_workers
from meshwright.planner.plan import Plan
from meshwright.planner.topology.levels import DOMAIN
from meshwright.planner.units import count_gpus

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
    now = _what_fits_now(plan, inventory, levels, replicas_fitting)
    if shortage is not None:
        never = _never_fits(plan, inventory, shortage)
        missing = [_level_sentence(plan, shape, shortage), *never]
        fix = _what_to_do(plan, "" if never else "Free more GPUs there, or set a wider level", now)
    else:
        # More workers may fit in other domains than in those of the workers that stay.
        fitting = _fitting(plan, min(workers_that_fit, needed - short), needed, len(kept))
        missing_gpus = count_gpus(short * plan.gpus_per_worker)
        missing = [
            f"{fitting}{_per_rack(capacity, shape)}: {missing_gpus} missing",
            *_groups(shape, levels),
            *_other_resources(plan, inventory, kept, levels, workers_that_fit),
        ]
        too_small = _too_small_when_empty(plan, inventory, levels, replicas_fitting, now)
        fix = too_small or _what_to_do(plan, f"Free {missing_gpus}", now)
    sentences = [*missing, *_skipped_nodes(plan, inventory), *fix]
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
    location = _LEVEL_NAMES.get(rule.level, rule.level)
    need = f"{workers} workers with {count_gpus(plan.gpus_per_worker)} each in one {location}"
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
    if fits(plan, inventory.emptied()):
        return []
    names = " or ".join(f"`topology.{one.dimension}.required`" for one in shortage.rules)
    return [f"It would not fit on the empty nodes either: set {names} to a wider level, or lower the degree"]


def _what_fits_now(plan: Plan, inventory: Inventory, levels: GroupLevels, replicas_fitting: int) -> str:
    """What to set so that the job fits on what is free now. Empty if nothing helps."""
    smaller, world = list(with_smaller_workers(plan, inventory)), plan.layout.world_size
    workers = (_worker_to_set(one) for one, gpus in smaller if gpus >= world and fits(one, inventory))
    settings = [*itertools.islice(workers, 1), *([_size_to_set(plan, replicas_fitting)] if replicas_fitting else [])]
    if settings:
        return " or ".join(settings)
    replica = plan.layout.replica_size
    both = ((_replicas_that_fit(one, inventory, levels), one) for one, gpus in smaller if gpus >= replica)
    most, one = max(both, key=lambda pair: (pair[0], pair[1].gpus_per_worker), default=(0, plan))
    return f"{_worker_to_set(one)} and {_size_to_set(plan, most)}" if most else ""


def _what_to_do(plan: Plan, free: str, fits_now: str) -> list[str]:
    """What to do now. `free` is what to free, or empty if that would not help."""
    if fits_now:
        return [f"{free}, or set {fits_now} to start now" if free else f"Set {fits_now} to start now"]
    smaller = "No smaller number of replicas fits now" if plan.layout.data > 1 else ""
    return [sentence for sentence in (free, smaller) if sentence]


def _too_small_when_empty(
    plan: Plan, inventory: Inventory, levels: GroupLevels, fitting_now: int, fits_now: str
) -> list[str]:
    """What to do if the job would not fit without other pods either, on all nodes. Empty if it would.

    Excluded nodes count: most are usable again later, such as those that are reserved for another job.

    Args:
        plan: the plan.
        inventory: the nodes.
        levels: the levels that groups must not leave.
        fitting_now: number of replicas that fit now.
        fits_now: what to set so that the job fits now.
    """
    shape, empty = GangShape(plan), inventory.emptied()
    every = replace(empty, nodes={name: replace(node, unusable="") for name, node in empty.nodes.items()})
    blocks = FreeCapacity(plan, every, {}, levels.base).total_blocks()
    if blocks >= shape.blocks:
        # Nodes that are reserved for another job are usable again without anyone's help.
        waits = bool(inventory.usable) or any(why.startswith(RESERVED) for why in inventory.excluded.values())
        return [] if waits else ["No node is usable: correct what excludes them, or add nodes"]
    where = "all nodes, with the excluded ones" if inventory.unusable else "the usable nodes"
    if not blocks:
        none = f"without any other pod, no worker fits on {where}"
        instead = f", or set {fits_now} to start now" if fits_now else ""
        return [f"Freeing GPUs is not enough: {none}. Add nodes on which one fits{instead}"]
    fitting, size = blocks * shape.block_workers, plan.gpus_per_worker
    sentence = (
        f"Freeing GPUs is not enough: the job needs {count_gpus(plan.layout.world_size)}, and without any other pod "
        f"{fitting} of its {shape.workers} workers ({count_gpus(fitting * size)}) fit on {where}"
    )
    return [sentence, _nearest_that_fits(plan, fitting_now, fits_now, _replicas_that_fit(plan, every, levels))]


def _nearest_that_fits(plan: Plan, now: int, fits_now: str, when_empty: int) -> str:
    """What to set if a job is too large for its cluster, by the numbers of replicas that fit and `fits_now`."""
    if not when_empty and fits_now:
        return f"Add nodes, or set {fits_now} to start now"
    if not when_empty:
        most = plan.layout.data
        replicas = next((count for count in range(1, most) if plan.allows_replicas(count)), most)
        gpus = replicas * plan.layout.replica_size
        if gpus == 1:
            return "Add nodes"
        needed = f"one replica ({plan.replica_summary}) needs"
        if replicas > 1:
            experts = f", EP {plan.layout.expert}" if plan.layout.expert > 1 else ""
            needed = f"the fewest replicas, {replicas} of {plan.replica_summary}{experts}, need"
        return f"Add nodes, or lower the degrees: {needed} {count_gpus(gpus)}"
    largest = f"{_size_to_set(plan, when_empty)}, the most that fits without other pods"
    if not fits_now:
        return f"Add nodes, or set {largest}"
    if now == when_empty:
        return f"Add nodes, or set {fits_now} to start now"
    return f"Add nodes, or set {fits_now} to start now, or {largest}"


_LEVEL_NAMES = {DOMAIN: "NVLink domain"}


def _size_to_set(plan: Plan, replicas: int) -> str:
    """The field for this number of replicas."""
    if plan.gpus is None:
        return f"`spec.replicas: {replicas}`"
    return f"`spec.gpus: {replicas * plan.layout.replica_size}`"


def _worker_to_set(plan: Plan) -> str:
    return f"`spec.workers.gpusPerWorker: {plan.gpus_per_worker}`"


def _fitting(plan: Plan, fitting: int, needed: int, kept: int) -> str:
    gpus = count_gpus(plan.gpus_per_worker)
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
    fit = "1 worker fits" if by_gpus == 1 else f"{by_gpus} workers fit"
    return [f"Counting only GPUs, {fit}: {missing}, see `workers.resources`"]


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
