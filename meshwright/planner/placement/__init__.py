"""Worker -> node, by what each group of ranks communicates.

A tensor-parallel group stays inside one NVLink domain (hard). All other groups pay for every further place they
touch at each level of the fabric, weighted by what they communicate; the cheapest placement is searched for and comes
with a lower bound, so that every answer says how far from the best it can be.
"""

from meshwright.planner.placement.again import Before, place_again
from meshwright.planner.placement.fragmentation import ToFree, cost_of_fragmentation, nodes_to_free
from meshwright.planner.placement.options import PlacingOptions
from meshwright.planner.placement.place import place
from meshwright.planner.placement.repair import keep_when_resized, map_ranks, repair_ranks
from meshwright.planner.placement.result import Placement
from meshwright.planner.placement.spares import spare_nodes, with_spares

__all__ = [
    "Before",
    "Placement",
    "PlacingOptions",
    "ToFree",
    "cost_of_fragmentation",
    "keep_when_resized",
    "nodes_to_free",
    "place",
    "place_again",
    "map_ranks",
    "repair_ranks",
    "spare_nodes",
    "with_spares",
]
