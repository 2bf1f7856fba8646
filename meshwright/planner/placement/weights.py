"""Cost of each further location of a group, by level: predicted traffic times the cost of the level's links.

Without predictions the weights are relative numbers in the order of typical traffic: context- and expert-parallel
groups communicate in every layer, pipeline neighbors once per micro-batch, and data-parallel groups once per step,
mostly hidden behind computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.planner.placement.rank_blocks import Dimension
from meshwright.planner.topology.levels import CORE, DOMAIN, NODE, RACK, REGION, SPINE, ZONE
from meshwright.planner.topology.links import Links

_DEFAULTS: dict[Dimension, dict[str, float]] = {
    Dimension.CONTEXT: {DOMAIN: 4, RACK: 16, SPINE: 32, CORE: 32, ZONE: 64, REGION: 128},
    Dimension.EXPERT: {DOMAIN: 4, RACK: 16, SPINE: 32, CORE: 32, ZONE: 64, REGION: 128},
    Dimension.PIPELINE: {DOMAIN: 1, RACK: 4, SPINE: 8, CORE: 8, ZONE: 16, REGION: 32},
    # Replicas communicate once per step, overlapped with computation; inside a rack this has no extra cost.
    Dimension.DATA: {DOMAIN: 0, RACK: 1, SPINE: 2, CORE: 2, ZONE: 4, REGION: 8},
}


@dataclass(frozen=True, slots=True)
class GroupTraffic:
    """Exposed bytes that one group sends per step to each further location that it touches, by dimension.

    Exposed bytes are those that computation does not hide. For a pipeline group they are the activations and gradients
    of all micro-batches over one stage boundary; for the other groups, one rank's share of their collectives.
    """

    context: float = 0.0
    expert: float = 0.0
    pipeline: float = 0.0
    data: float = 0.0


@dataclass(frozen=True, slots=True)
class Weights:
    """Cost of one more location, by dimension and level. A level without an entry costs the same as a spine.

    Raises:
        ValueError: a weight is negative or not finite.
    """

    costs: Mapping[Dimension, Mapping[str, float]] = field(default_factory=lambda: _DEFAULTS)

    def __post_init__(self) -> None:
        for dimension, by_level in self.costs.items():
            for level, cost in by_level.items():
                if not 0 <= cost < float("inf"):
                    raise ValueError(f"the cost of {dimension} groups at level {level} is {cost}: it must be 0 or more")

    def of(self, dimension: Dimension, level: str) -> float:
        """Cost of one more location of `level` for a group of `dimension`."""
        costs = self.costs.get(dimension, {})
        return costs[level] if level in costs else costs.get(SPINE, 0.0)

    @classmethod
    def from_traffic(cls, traffic: GroupTraffic, links: Links) -> Weights:
        """Compute seconds per step that one more location of each level adds to those of the level below."""
        sent = {
            Dimension.CONTEXT: traffic.context,
            Dimension.EXPERT: traffic.expert,
            Dimension.PIPELINE: traffic.pipeline,
            Dimension.DATA: traffic.data,
        }
        return cls(
            {d: {lv: size * links.extra_seconds_per_byte(lv) for lv in links.levels} for d, size in sent.items()}
        )

    def without_nodes(self) -> Weights:
        """The same weights if nodes are a level: nodes of one domain reach each other as fast as GPUs of one node."""
        return Weights({dimension: {**costs, NODE: 0.0} for dimension, costs in self.costs.items()})

    def scaled(self, factor: float) -> Weights:
        """The same weights in another unit."""
        return Weights({d: {lv: cost * factor for lv, cost in by.items()} for d, by in self.costs.items()})
