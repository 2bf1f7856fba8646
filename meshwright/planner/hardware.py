"""What planning reads of a cluster: limits and a representative machine, which are a few numbers for any cluster."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cluster.limits import ClusterLimits
from meshwright.planner.cost.machine import Machine
from meshwright.planner.cost_model import Calibration, machine_of_cluster
from meshwright.planner.topology.site import DEFAULT_SITE, SiteFabric


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware that a job is planned for. Inventories with equal hardware give equal plans."""

    limits: ClusterLimits = field(default_factory=ClusterLimits)
    machine: Machine | None = None
    """None if no usable node's GPU is in the catalog."""
    site: SiteFabric = field(default_factory=lambda: DEFAULT_SITE)
    """What the administrator states about the fabric."""

    @classmethod
    def of(cls, inventory: Inventory, gpus_per_worker: int) -> Hardware:
        """Return the hardware of an inventory, for workers of this size."""
        limits, machine = ClusterLimits.of(inventory, gpus_per_worker), machine_of_cluster(inventory, gpus_per_worker)
        return cls(limits, machine, inventory.site)

    def calibrated(self, calibration: Calibration | None) -> Hardware:
        """Return the hardware with the constants that were fitted to running jobs."""
        if calibration is None or self.machine is None:
            return self
        return replace(self, machine=calibration.on(self.machine))
