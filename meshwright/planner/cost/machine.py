"""The hardware and framework that a layout runs on, in one object: the key of a search's caches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from meshwright.planner.cost.accelerators import Accelerator
from meshwright.planner.cost.constants import Constants
from meshwright.planner.cost.fabric import Fabric
from meshwright.planner.cost.frameworks import Framework


@dataclass(frozen=True, slots=True)
class Machine:
    """GPU, fabric, framework and the fitted constants."""

    gpu: Accelerator
    fabric: Fabric
    runtime: Framework
    constants: Constants = Constants()
    nvme: float = 3e9
    """Bytes/s of one GPU's share of local NVMe."""
    slowest: float = 1.0
    """Speed of the slowest GPU of the job relative to `gpu`. Every step waits for it."""
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.gpu, self.fabric, self.runtime, self.constants)))

    def running(self, runtime: Framework) -> Machine:
        """Return the machine with a framework, and without the sums in switches that it does not use."""
        fabric = self.fabric if runtime.sums_in_nvlink_switches else self.fabric.without_nvlink_sums()
        return replace(self, runtime=runtime, fabric=fabric)

    def __hash__(self) -> int:
        """Computed once: machines are part of many keys."""
        return self._hash
