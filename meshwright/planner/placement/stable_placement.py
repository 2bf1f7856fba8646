"""Placing a job that was placed before: as few workers as possible change their nodes.

A worker that runs never moves. One that has to start anyway goes back to where it was, since its node has the image and
its neighbours are its groups'; where the whole gang starts anew and a cheaper placement is there, it takes that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwright.api.rank_ranges import in_rank_order, parse_ranks
from meshwright.api.status import PlacementStatus
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.placement.capacity import FreeCapacity, GangShape
from meshwright.planner.placement.options import PlacingOptions
from meshwright.planner.placement.place import place
from meshwright.planner.placement.rank_mapping import keep_on_resize
from meshwright.planner.placement.result import Placement
from meshwright.planner.plan import Plan

_DEFAULT = PlacingOptions()
_COST_TOLERANCE = 1 + 1e-9
"""Equal costs may differ by the order in which they were added up."""


@dataclass(frozen=True, slots=True)
class PreviousPlacement:
    """Where a job ran last, and as what."""

    tensor: int
    pipeline: int
    data: int
    gpus_per_worker: int
    nodes: Mapping[int, str]
    """Worker of that plan, in the order of ranks -> node."""

    @classmethod
    def of_status(cls, placement: PlacementStatus | None) -> PreviousPlacement | None:
        """What `status.placement` says; None where it says nothing or contradicts itself."""
        if placement is None or not (placement.tensor and placement.pipeline and placement.data):
            return None
        workers = in_rank_order(placement.workers)
        ranks = parse_ranks(workers[0].ranks) if workers else None
        if ranks is None or len({entry.worker for entry in workers}) < len(workers):
            return None
        gpus = len(ranks)
        if len(workers) * gpus % (placement.tensor * placement.pipeline * placement.data):
            return None
        nodes = {slot: entry.node for slot, entry in enumerate(workers)}
        return cls(placement.tensor, placement.pipeline, placement.data, gpus, nodes)

    def plan_like(self, plan: Plan) -> Plan | None:
        """The plan that ran, where it differs from `plan` in these degrees alone; None where it was another one."""
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
    """A node for every worker of `plan`, near to where the job was.

    Beside workers that stay, and when replicas are added or taken away, every worker that can goes back to its node.
    When the whole gang starts anew its old placement, as far as it is possible, is one candidate: it is taken unless
    another costs less.

    Args:
        plan: what runs; of other degrees than before, nothing is brought back.
        inventory: the nodes; it must not count this job's own pods.
        keep: workers that run and stay.
        before: where the job was.
        options: as for `place`.

    Raises:
        DoesNotFitError, ValueError: as `place`.
    """
    kept = dict(keep or {})
    for stays in _with_returning_workers(plan, inventory, kept, before, options):
        try:
            returned = place(plan, inventory, stays, options)
        except DoesNotFitError:
            continue
        if kept or (before is not None and before.data != plan.layout.data):
            return returned
        fresh = place(plan, inventory, kept, options)
        return returned if returned.cost <= fresh.cost * _COST_TOLERANCE else fresh
    return place(plan, inventory, kept, options)


def _with_returning_workers(
    plan: Plan, inventory: Inventory, keep: Mapping[int, str], before: PreviousPlacement | None, options: PlacingOptions
) -> list[dict[int, str]]:
    """Workers that stay or go back: all that can, and then without those whose tensor-parallel group is incomplete."""
    previous_plan = before.plan_like(plan) if before is not None else None
    if before is None or previous_plan is None:
        return []
    capacity = FreeCapacity(plan, inventory, keep, options.tensor_within)
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
