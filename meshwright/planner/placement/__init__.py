"""Chooses a node for every worker, by what each group of ranks communicates.

A tensor-parallel group stays inside one NVLink domain (hard constraint). Every other group has a cost for each further
location that it touches at each level of the fabric, weighted by its traffic. The search looks for the placement with
the lowest cost. Each result has a lower bound, which limits how far it can be from the optimum.
"""

from meshwright.planner.placement.fragmentation import NodesToFree, cost_of_fragmentation, nodes_to_free
from meshwright.planner.placement.options import PlacingOptions
from meshwright.planner.placement.place import place
from meshwright.planner.placement.rank_mapping import keep_on_resize, map_ranks, remap_ranks
from meshwright.planner.placement.result import Placement
from meshwright.planner.placement.spare_nodes import spare_nodes, with_spares
from meshwright.planner.placement.stable_placement import PreviousPlacement, place_near_previous

__all__ = [
    "PreviousPlacement",
    "Placement",
    "PlacingOptions",
    "NodesToFree",
    "cost_of_fragmentation",
    "keep_on_resize",
    "nodes_to_free",
    "place",
    "place_near_previous",
    "map_ranks",
    "remap_ranks",
    "spare_nodes",
    "with_spares",
]
