"""Places a job again after a restart or resize: as few workers as possible change their nodes.

A running worker never moves. A worker that has to start anyway returns to its previous node, because that node has the
image and is close to the other ranks of its groups. If all workers restart and another placement costs less, the job
uses that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwright.api.status import PlacementStatus, in_rank_order, parse_ranks
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.placement.capacity import FreeCapacity, GangShape
from meshwright.planner.placement.group_levels import base_level
from meshwright.planner.placement.options import PlacingOptions
from meshwright.planner.placement.place import place, place_of
from meshwright.planner.placement.rank_mapping import keep_on_resize
from meshwright.planner.placement.result import Placement
from meshwright.planner.plan import Plan
from meshwright.planner.topology.levels import DOMAIN

_DEFAULT = PlacingOptions()
_COST_TOLERANCE = 1 + 1e-9
"""Costs that differ by less are equal: the order of summation changes the rounding."""


@dataclass(frozen=True, slots=True)
class PreviousPlacement:
    """The last placement of a job, with its degrees."""

    tensor: int
    pipeline: int
    data: int
    gpus_per_worker: int
    nodes: Mapping[int, str]
    """Worker of that plan, in rank order -> node."""

    @classmethod
    def of_status(cls, placement: PlacementStatus | None) -> PreviousPlacement | None:
        """Return the placement in `status.placement`. None if there is none or it contradicts itself."""
        if placement is None or not (placement.tensor and placement.pipeline and placement.data):
            return None
        workers = in_rank_order(placement.workers)
        ranks = parse_ranks(workers[0].ranks) if workers else None
        if ranks is None or len({entry.worker for entry in workers}) < len(workers):
            return None
        gpus = len(ranks)
        if len(workers) * gpus % (placement.tensor * placement.pipeline * placement.data):
            return None
        nodes = {plan_worker: entry.node for plan_worker, entry in enumerate(workers)}
        return cls(placement.tensor, placement.pipeline, placement.data, gpus, nodes)

    def plan_like(self, plan: Plan) -> Plan | None:
        """The previous plan, if it differs from `plan` only in these degrees. None otherwise."""
        strategy = replace(plan.strategy, tensor=self.tensor, pipeline=self.pipeline, data=self.data)
        if strategy.world_size != len(self.nodes) * self.gpus_per_worker:
            return None
        return replace(plan, strategy=strategy, gpus_per_worker=self.gpus_per_worker)


def place_near_previous(
    plan: Plan,
    inventory: Inventory,
    keep: Mapping[int, str] | None = None,
    before: PreviousPlacement | None = None,
    options: PlacingOptions = _DEFAULT,
) -> Placement:
    """Choose a node for every worker of `plan`, close to the previous placement.

    If some workers stay, or the number of replicas changes, every other worker returns to its node if possible. If all
    workers restart, the previous placement, as far as it is possible, is one candidate. It is used unless another one
    costs less.

    Args:
        plan: the plan. If its degrees differ from the previous ones, no worker returns to its node.
        inventory: the nodes. It must not count this job's own pods.
        keep: running workers that stay: worker index -> node.
        before: the previous placement.
        options: as for `place`.

    Raises:
        DoesNotFitError, ValueError: as `place`.
    """
    kept = dict(keep or {})
    options = _as_far_as_before(plan, inventory, before, options)
    for stays in _with_returning_workers(plan, inventory, kept, before, options):
        try:
            returned = place(plan, inventory, stays, options)
        except DoesNotFitError:
            continue
        if kept or (before is not None and before.data != plan.layout.data):
            return returned
        fresh = place(plan, inventory, kept, options)
        fewer = returned.broken_preferences - fresh.broken_preferences
        same_cost = returned.cost <= fresh.cost * _COST_TOLERANCE
        return returned if fewer < 0 or (fewer == 0 and same_cost) else fresh
    return place(plan, inventory, kept, options)


def spans_further(plan: Plan, inventory: Inventory, before: PreviousPlacement | None) -> bool:
    """Whether tensor-parallel groups of the job leave the level that those of a new job must not leave."""
    return _as_far_as_before(plan, inventory, before, _DEFAULT) != _DEFAULT


def _as_far_as_before(
    plan: Plan, inventory: Inventory, before: PreviousPlacement | None, options: PlacingOptions
) -> PlacingOptions:
    """The options, with which tensor-parallel groups may leave the level that those of the job have left already.

    Before 0.2, hosts of a clique were one NVLink domain for all jobs. Jobs that were placed then keep what they span.
    """
    previous_plan = before.plan_like(plan) if before is not None else None
    if before is None or previous_plan is None or before.tensor != plan.layout.tensor:
        return options
    shape, known = GangShape(previous_plan), inventory.nodes
    groups = [
        {before.nodes[worker] for worker in shape.workers_of(block) if before.nodes[worker] in known}
        for block in range(shape.blocks)
    ]
    for level in inventory.levels[inventory.levels.index(options.tensor_within) :]:
        if all(len({place_of(inventory, node).at(level) for node in group}) <= 1 for group in groups):
            return replace(options, tensor_within=level)
    return options


def _closest_level(plan: Plan, options: PlacingOptions) -> str:
    """The level that blocks must not leave."""
    level = options.tensor_within
    return level if level != DOMAIN or not plan.topology else base_level(plan)


def _with_returning_workers(
    plan: Plan, inventory: Inventory, keep: Mapping[int, str], before: PreviousPlacement | None, options: PlacingOptions
) -> list[dict[int, str]]:
    """Workers that stay or return: all that can, and then without those whose tensor-parallel group is incomplete."""
    previous_plan = before.plan_like(plan) if before is not None else None
    if before is None or previous_plan is None:
        return []
    capacity = FreeCapacity(plan, inventory, keep, _closest_level(plan, options))
    free = {name: count for domain in capacity.domains for name, count in capacity.nodes_in(domain).items()}
    lost = frozenset(node for node in before.nodes.values() if not free.get(node))
    stays = dict(keep)
    for worker, node in keep_on_resize(previous_plan, plan, before.nodes, lost).items():
        if worker not in keep and free.get(node, 0) > 0:
            stays[worker] = node
            free[node] -= 1
    if len(stays) == len(keep):
        return []
    shape = GangShape(plan)
    complete_blocks = {
        w for b in range(shape.blocks) for w in shape.workers_of(b) if stays.keys() >= set(shape.workers_of(b))
    }
    without_partial_blocks = {
        worker: node for worker, node in stays.items() if worker in keep or worker in complete_blocks
    }
    return [stays] if without_partial_blocks == stays else [stays, without_partial_blocks]
