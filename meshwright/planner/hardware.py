"""What planning reads of a cluster: limits and a representative machine, which are a few numbers for any cluster."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cluster.limits import ClusterLimits
from meshwright.planner.cost.machine import Machine
from meshwright.planner.cost_model import Calibration, gpu_products, machine_of_cluster
from meshwright.planner.topology.site import DEFAULT_SITE, SiteFabric


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware that a job is planned for. Inventories with equal hardware give equal plans."""

    limits: ClusterLimits = field(default_factory=ClusterLimits)
    machine: Machine | None = None
    """None if no usable node's GPU is in the catalog."""
    site: SiteFabric = field(default_factory=lambda: DEFAULT_SITE)
    """What the administrator states about the fabric."""
    of_products: tuple[Hardware, ...] = ()
    """If nodes have different GPU products: the hardware of each alone."""

    @classmethod
    def of(cls, inventory: Inventory, gpus_per_worker: int) -> Hardware:
        """Return the hardware of an inventory, for workers of this size."""
        limits, machine = ClusterLimits.of(inventory, gpus_per_worker), machine_of_cluster(inventory, gpus_per_worker)
        products = gpu_products(inventory, gpus_per_worker)
        alone = tuple(cls.of(inventory.only(product), gpus_per_worker) for product in products)
        return cls(limits, machine, inventory.site, tuple(one for one in alone if one.machine is not None))

    def calibrated(self, calibration: Calibration | None) -> Hardware:
        """Return the hardware with the constants that were fitted to running jobs."""
        if calibration is None or self.machine is None:
            return self
        alone = tuple(one.calibrated(calibration) for one in self.of_products)
        return replace(self, machine=calibration.on(self.machine), of_products=alone)
