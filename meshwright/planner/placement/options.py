"""Options of a placement beyond the plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.layout import Layout
from meshwright.planner.placement.rank_blocks import RankBlocks
from meshwright.planner.placement.weights import Weights
from meshwright.planner.topology.levels import DOMAIN

DEFAULT_EFFORT = 600_000
LARGE_EFFORT = 1_200_000
LARGE_BLOCKS = 320
"""With more blocks than this, a placement is searched in parts, which makes better use of a long search."""


@dataclass(frozen=True, slots=True)
class PlacingOptions:
    """How to place.

    Attributes:
        weights: cost of each further location of a group. `Weights.from_traffic` computes them in seconds from
            predicted traffic.
        tensor_within: the level that a tensor-parallel group must not leave. A level wider than the NVLink domain
            explicitly allows such groups to cross the network.
        effort: how many assignments of one block the search may try in total. A higher number lowers the cost on large
            fragmented clusters. The search stops early at its lower bound. It is a count and not a time, so that the
            same cluster always gets the same placement. None: a default for the size of the job.
        mesh: all groups, if context- or expert-parallel ones are placed too. Default: the groups of the plan's layout.

    Raises:
        ValueError: `effort` is negative.
    """

    weights: Weights = field(default_factory=Weights)
    tensor_within: str = DOMAIN
    effort: int | None = None
    mesh: RankBlocks | None = None

    def __post_init__(self) -> None:
        if self.effort is not None and self.effort < 0:
            raise ValueError(f"`effort` is {self.effort}: it must be 0 or more")

    def effort_for(self, blocks: int) -> int:
        """How many assignments of one block to try for a job with this number of blocks."""
        if self.effort is not None:
            return self.effort
        return LARGE_EFFORT if blocks > LARGE_BLOCKS else DEFAULT_EFFORT

    def mesh_of(self, layout: Layout, gpus_per_worker: int) -> RankBlocks:
        """The groups to place for a plan of this layout.

        Raises:
            ValueError: `mesh` has another world size, tensor degree or worker size than the plan.
        """
        layout_blocks = RankBlocks.of(layout, gpus_per_worker)
        if self.mesh is None:
            return layout_blocks
        mesh_numbers = (self.mesh.world_size, self.mesh.tensor, self.mesh.gpus_per_worker)
        if mesh_numbers != (layout_blocks.world_size, layout_blocks.tensor, layout_blocks.gpus_per_worker):
            raise ValueError(
                f"`mesh` has {mesh_numbers[0]} ranks, TP {mesh_numbers[1]} and {mesh_numbers[2]} GPUs per worker, the "
                "plan "
                f"{layout_blocks.world_size}, {layout_blocks.tensor} and {layout_blocks.gpus_per_worker}: give the "
                "mesh of this plan"
            )
        return self.mesh
