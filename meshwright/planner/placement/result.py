"""A placement: the node of every worker of a plan, its cost, and how far it can be from the optimum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.api.objects import pod_name
from meshwright.api.status import PlacementStatus, WorkerPlacement, format_ranks
from meshwright.figures import counted
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cost.accelerators import accelerator
from meshwright.planner.placement.objective import CrossingCosts
from meshwright.planner.plan import Plan
from meshwright.planner.topology.levels import DOMAIN
from meshwright.planner.topology.location import Location
from meshwright.planner.units import GB


@dataclass(frozen=True, slots=True)
class Placement:
    """The node of every worker of a plan, and the cost."""

    plan: Plan
    nodes: dict[int, str]
    """Worker index -> node."""
    places: dict[int, Location]
    """Worker index -> the location of its node."""
    crossings: CrossingCosts
    bound: float = 0.0
    """No placement of this plan on these nodes costs less."""
    notes: tuple[str, ...] = ()
    """Remarks about the placement, in sentences."""
    spares: tuple[str, ...] = ()
    """Nodes to reserve for the replacements of lost workers, the most useful first."""
    topology: Mapping[str, str] = field(default_factory=dict)
    """With `spec.topology`: dimension -> the closest level that none of its groups leaves."""
    broken_preferences: int = 0
    """How many locations too many the groups of preferred levels have together."""
    joined: bool = True
    """Whether a claim joins the pods of one host."""

    @property
    def order(self) -> tuple[int, float]:
        """Lower is better: first fewer broken preferences, then a lower cost."""
        return self.broken_preferences, self.cost

    @property
    def cost(self) -> float:
        """Weighted crossings; lower is better."""
        return self.crossings.cost

    @property
    def gap(self) -> float | None:
        """Largest fraction of the cost that an optimal placement might save, from 0 (proved optimal) to 1.

        None if `spec.topology` states levels and it is not 0: the bound knows nothing of these levels, so most of the
        difference may be what they cost.
        """
        if self.cost <= self.bound:
            return 0.0
        return None if self.plan.topology is not None else (self.cost - self.bound) / self.cost

    def to_status(
        self, job: str, incarnations: Mapping[int, int], plan_workers: Mapping[int, int] | None = None
    ) -> PlacementStatus:
        """The placement as `status.placement`.

        Args:
            job: the job's name.
            incarnations: worker -> incarnation; a worker without an entry is in its first, 0.
            plan_workers: worker -> plan worker, if they differ.
        """
        given = plan_workers or {worker: worker for worker in self.nodes}
        ranks = self.plan.workers
        return PlacementStatus(
            workers=[
                WorkerPlacement(
                    worker=worker,
                    incarnation=incarnations.get(worker, 0),
                    pod=pod_name(job, worker, incarnations.get(worker, 0)),
                    node=self.nodes[plan_worker],
                    ranks=format_ranks(ranks[plan_worker]),
                    domain=self.places[plan_worker].domain,
                    rack=self.places[plan_worker].rack,
                )
                for worker, plan_worker in sorted(given.items())
            ],
            tensor=self.plan.layout.tensor,
            pipeline=self.plan.layout.pipeline,
            data=self.plan.layout.data,
            cost=f"{self.cost:g}",
            gap="" if self.gap is None else f"{self.gap:.3g}",
            straddling_tensor_groups=self.crossings.straddling_tensor_groups,
            straddling_replicas=self.crossings.straddling_replicas,
            topology=dict(self.topology) or None,
            spares=list(self.spares),
        )


_NVLINK = 450


def placement_notes(
    plan: Plan, inventory: Inventory, nodes: Mapping[int, str], crossings: CrossingCosts, tensor_within: str
) -> tuple[str, ...]:
    """Sentences about different GPU products in one job, and about tensor-parallel groups without NVLink."""
    used = (inventory.nodes[node].gpu_product for node in nodes.values() if node in inventory.nodes)
    products = Counter(used)
    sentences: list[str] = []
    if len(products) > 1:
        parts = ", ".join(
            f"{counted(count, 'worker')} on {product or 'unknown'}" for product, count in sorted(products.items())
        )
        sentences.append(
            f"different GPU products ({parts}): each step waits for the slowest; the job does not fit on a single "
            "GPU product"
        )
    if crossings.straddling_tensor_groups and tensor_within != DOMAIN:
        sentences.append(
            f"{crossings.straddling_tensor_groups} tensor-parallel groups leave their NVLink domain, as allowed up to "
            f"{tensor_within}"
        )
    pods_of_nodes = Counter(nodes.values())
    if crossings.straddling_tensor_groups and not inventory.pods_joined and max(pods_of_nodes.values()) > 1:
        sentences.append(
            f"{crossings.straddling_tensor_groups} tensor-parallel groups span several pods of a host, and communicate "
            "over the network: no claim joins the pods. Raise `workers.gpusPerWorker`, or lower `parallelism.tensor`"
        )
    if plan.layout.tensor > 1:
        sentences += [text for product in sorted(products) if (text := _over_pcie(product))]
    return tuple(sentences)


def _over_pcie(product: str) -> str:
    gpu = accelerator(product)
    if gpu is None or gpu.domain > 1:
        return ""
    return (
        f"tensor-parallel groups run over PCIe inside a node: {gpu.link / GB:.0f} GB/s for a {product}, where NVLink "
        f"of an H100 carries {_NVLINK}; a smaller `parallelism.tensor` communicates less"
    )
