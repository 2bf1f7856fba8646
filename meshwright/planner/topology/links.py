"""Bandwidth between locations of each level, per GPU.

Inside a location of the closest level NVLink carries traffic (or PCIe, on nodes without it). Between two locations the
network cards carry it. Switch layers above may be oversubscribed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.planner.topology.levels import CORE, DOMAIN, RACK, REGION, SPINE, ZONE

SHARE_OF_NIC: Mapping[str, float] = {DOMAIN: 1.0, RACK: 0.8, SPINE: 0.5, CORE: 1 / 7, ZONE: 0.05, REGION: 0.01}
"""Fraction of its network card's bandwidth that a GPU gets between two locations of a level, if none was measured.

The 1:7 of the top layer is Llama 3's (arXiv 2407.21783, section 3.3.1). The others are conservative guesses in between.
"""

MIN_EXTRA = 0.05
"""Additional cost of a byte at a level whose links are as fast as those below, as a fraction of its cost there."""


@dataclass(frozen=True, slots=True)
class Links:
    """Bytes per second and GPU.

    Attributes:
        levels: the tree's levels, closest first.
        inside: bandwidth inside a location of the closest level, in one direction.
        nic: bandwidth of the GPU's share of the node's network cards.
        measured: measured bandwidth between two locations of a level. It replaces the default fraction.

    Raises:
        ValueError: a bandwidth is not above 0.
    """

    levels: Sequence[str]
    inside: float
    nic: float
    measured: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("inside", self.inside), ("nic", self.nic), *self.measured.items()):
            if not value > 0:
                raise ValueError(f"the bandwidth {name!r} is {value} bytes per second: it must be above 0")

    def between(self, level: str) -> float:
        """Bandwidth between two locations of a level. Never more than between locations of the level below."""
        narrowest = self.inside
        for name in self.levels:
            bandwidth_here = self.measured.get(name) or self.nic * SHARE_OF_NIC.get(name, SHARE_OF_NIC[SPINE])
            narrowest = min(narrowest, bandwidth_here)
            if name == level:
                break
        return narrowest

    def extra_seconds_per_byte(self, level: str) -> float:
        """Additional seconds per byte between two locations of this level, compared with inside one.

        It is above 0 above the closest level, because each layer of switches has queues, whatever its bandwidth.
        """
        position = list(self.levels).index(level)
        if not position:
            return 1 / self.between(level) - 1 / self.inside
        between = 1 / self.between(level)
        return max(between - 1 / self.between(self.levels[position - 1]), MIN_EXTRA * between)
