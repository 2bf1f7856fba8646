"""A placement: where every worker of a plan runs, what that costs, and how far from the best it can be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.api.names import pod_name
from meshwright.api.rank_ranges import format_ranks
from meshwright.api.status import PlacementStatus, WorkerPlacement
from meshwright.planner.placement.objective import CrossingCosts
from meshwright.planner.plan import Plan
from meshwright.planner.topology.location import Location


@dataclass(frozen=True, slots=True)
class Placement:
    """Where every worker of a plan runs."""

    plan: Plan
    nodes: dict[int, str]
    """Worker index -> node."""
    places: dict[int, Location]
    """Worker index -> where that node is."""
    crossings: CrossingCosts
    bound: float = 0.0
    """No placement of this plan on these nodes costs less."""
    notes: tuple[str, ...] = ()
    """What is worth knowing about it, in sentences."""
    spares: tuple[str, ...] = ()
    """Nodes to keep free for workers that are lost, the most useful first."""

    @property
    def cost(self) -> float:
        """Weighted crossings; lower is better."""
        return self.crossings.cost

    @property
    def gap(self) -> float:
        """The part of the cost that the best placement might save at most, from 0 (proved best) to 1."""
        return (self.cost - self.bound) / self.cost if self.cost > self.bound else 0.0

    def to_status(
        self, job: str, incarnations: Mapping[int, int], slots: Mapping[int, int] | None = None
    ) -> PlacementStatus:
        """The placement as `status.placement`.

        Args:
            job: its name.
            incarnations: worker -> incarnation; a worker without an entry is in its first, 0.
            slots: worker -> which of the plan's workers it is, where that is not told by its index.
        """
        given = slots or {worker: worker for worker in self.nodes}
        return PlacementStatus(
            workers=[
                WorkerPlacement(
                    worker=worker,
                    incarnation=incarnations.get(worker, 0),
                    pod=pod_name(job, worker, incarnations.get(worker, 0)),
                    node=self.nodes[slot],
                    ranks=format_ranks(self.plan.workers[slot]),
                    domain=self.places[slot].domain,
                    rack=self.places[slot].rack,
                )
                for worker, slot in sorted(given.items())
            ],
            tensor=self.plan.layout.tensor,
            pipeline=self.plan.layout.pipeline,
            data=self.plan.layout.data,
            cost=f"{self.cost:g}",
            gap=f"{self.gap:.3g}",
            straddling_tensor_groups=self.crossings.straddling_tensor_groups,
            straddling_replicas=self.crossings.straddling_replicas,
            spares=list(self.spares),
        )
