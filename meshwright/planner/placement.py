"""Worker -> node, by what each group of ranks communicates.

A tensor-parallel group stays inside one NVLink domain (hard). The stages of a replica stay in one rack where they
fit, replicas spread evenly over the fewest racks, and tight fits come first, so that whole domains stay whole for
others. Deterministic: the same inventory gives the same placement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.api.names import pod_name
from meshwright.api.status import PlacementStatus, WorkerPlacement
from meshwright.planner.assign import Assignment, place_of
from meshwright.planner.crossings import Crossings, crossings
from meshwright.planner.inventory import Inventory
from meshwright.planner.plan import Plan
from meshwright.planner.room import Room, Shape
from meshwright.planner.topology import Place

_MAX_ZONES_TRIED = 8


@dataclass(frozen=True, slots=True)
class Placement:
    """Where every worker of a plan runs."""

    plan: Plan
    nodes: dict[int, str]
    """Worker index -> node."""
    places: dict[int, Place]
    """Worker index -> where that node is."""
    crossings: Crossings

    @property
    def cost(self) -> float:
        """Weighted crossings; lower is better."""
        return self.crossings.cost

    def to_status(self, job: str, incarnations: Mapping[int, int]) -> PlacementStatus:
        """The placement as `status.placement`; a worker without an entry in `incarnations` is in its first, 0."""
        return PlacementStatus(
            workers=[
                WorkerPlacement(
                    worker=worker,
                    incarnation=incarnations.get(worker, 0),
                    pod=pod_name(job, worker, incarnations.get(worker, 0)),
                    node=self.nodes[worker],
                    ranks=_rank_text(ranks),
                    domain=self.places[worker].domain,
                    rack=self.places[worker].rack,
                )
                for worker, ranks in enumerate(self.plan.workers)
            ],
            cost=f"{self.cost:g}",
            straddling_tensor_groups=self.crossings.straddling_tensor_groups,
            straddling_replicas=self.crossings.straddling_replicas,
        )


def place(plan: Plan, inventory: Inventory, keep: Mapping[int, str] | None = None) -> Placement:
    """A node for every worker of `plan`.

    `keep` names workers that stay where they are, also on nodes that take nothing new; the others go as near to their
    group as there is room. `inventory` must not count this job's own pods (`Inventory.from_objects(without_job=)`).

    Raises:
        DoesNotFitError: there is no room; nothing is placed in part.
    """
    kept = {worker: node for worker, node in (keep or {}).items() if 0 <= worker < Shape(plan).workers}
    found = [
        _placed(plan, inventory, kept, racks, whole_domains)
        for racks in _rack_choices(plan, inventory, kept)
        for whole_domains in (False, True)
    ]
    return min(found, key=lambda placement: placement.cost)


def _placed(
    plan: Plan, inventory: Inventory, kept: Mapping[int, str], racks: Sequence[str], whole_domains: bool
) -> Placement:
    nodes = Assignment(plan, inventory, kept).run(racks, whole_domains)
    places = {worker: place_of(inventory, node) for worker, node in nodes.items()}
    return Placement(plan, nodes, places, crossings(plan, places))


def _rack_choices(plan: Plan, inventory: Inventory, kept: Mapping[int, str]) -> list[list[str]]:
    """Sets of racks to try: those of one zone alone where it holds everything, tightest first; and all."""
    room = Room(plan, inventory, kept)
    if kept or len(room.racks) <= 1:
        return [room.all_racks]
    needed = Shape(plan).blocks
    sizes = {zone: sum(room.rack_blocks(rack) for rack in racks) for zone, racks in room.racks.items()}
    holding = sorted((size, zone) for zone, size in sizes.items() if size >= needed)
    return [*(room.racks[zone] for _, zone in holding[:_MAX_ZONES_TRIED]), room.all_racks]


def _rank_text(ranks: range) -> str:
    return str(ranks.start) if len(ranks) == 1 else f"{ranks.start}-{ranks.stop - 1}"
