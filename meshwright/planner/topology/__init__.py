"""Locations of nodes in the fabric: a tree of levels from node labels, and the cost of crossing each level."""

from meshwright.planner.topology.levels import DEFAULT_LEVELS, Level
from meshwright.planner.topology.location import Location, first_meaningful_value, locate
from meshwright.planner.topology.tree import as_tree

__all__ = ["DEFAULT_LEVELS", "Level", "Location", "as_tree", "first_meaningful_value", "locate"]
