"""Bandwidth between places of each level, per GPU.

Inside a place of the closest level NVLink carries traffic (or PCIe, on hosts without it); between two places the
network cards do, and every switch layer above may be shared by more than it can carry at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.planner.topology.levels import CORE, DOMAIN, RACK, REGION, SPINE, ZONE

SHARE_OF_NIC: Mapping[str, float] = {DOMAIN: 1.0, RACK: 0.8, SPINE: 0.5, CORE: 1 / 7, ZONE: 0.05, REGION: 0.01}
"""Part of its network card's bandwidth that a GPU gets between two places of a level, where none was measured. The
1:7 of the topmost layer is Llama 3's (arXiv 2407.21783, section 3.3.1); the others are cautious guesses in between."""

MIN_EXTRA = 0.05
"""What a byte costs more at a level whose links are as fast as those below, as part of what it costs there at all."""


@dataclass(frozen=True, slots=True)
class Links:
    """Bytes per second and GPU.

    Attributes:
        levels: the tree's levels, closest first.
        inside: inside a place of the closest level, in one direction.
        nic: of the GPU's share of the node's network cards.
        measured: between two places of a level, where it was measured; takes the place of the default share.

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
        """Bandwidth between two places of a level; never more than between places of the level below."""
        narrowest = self.inside
        for name in self.levels:
            bandwidth_here = self.measured.get(name) or self.nic * SHARE_OF_NIC.get(name, SHARE_OF_NIC[SPINE])
            narrowest = min(narrowest, bandwidth_here)
            if name == level:
                break
        return narrowest

    def extra_seconds_per_byte(self, level: str) -> float:
        """What a byte costs more between two places of this level than inside one.

        Never nothing above the closest level: one more layer of switches has queues, whatever its bandwidth.
        """
        position = list(self.levels).index(level)
        if not position:
            return 1 / self.between(level) - 1 / self.inside
        between = 1 / self.between(level)
        return max(between - 1 / self.between(self.levels[position - 1]), MIN_EXTRA * between)
