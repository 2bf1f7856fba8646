"""Solving one problem: partly placed replicas first, then the whole ones by search, then evening out.

A small problem is searched as a whole. A large one is constructed in the shapes that large grids want, and in parts
that are searched each by itself; the better of the two is taken.
"""

from __future__ import annotations

from meshwright.planner.mesh import Mesh
from meshwright.planner.placement.balance import balance
from meshwright.planner.placement.divide import divide
from meshwright.planner.placement.fill import fill
from meshwright.planner.placement.grid import Grid, grids, strips
from meshwright.planner.placement.options import LARGE_BLOCKS
from meshwright.planner.placement.problem import UNPLACED, Problem
from meshwright.planner.placement.search import Found, Search


def solve(mesh: Mesh, problem: Problem, bound: float, effort: int) -> Found:
    """A bin for every block; fixed blocks keep theirs.

    Args:
        mesh: how blocks form replicas.
        problem: groups and bins, which must have room for all blocks.
        bound: a cost no placement can be below, at which the search stops.
        effort: see `PlacingOptions.effort`.
    """
    bins = list(problem.fixed)
    width = mesh.segment_blocks
    whole: list[int] = []
    for segment in range(mesh.blocks // width):
        missing = [block for block in range(segment * width, (segment + 1) * width) if bins[block] == UNPLACED]
        if len(missing) == width:
            whole.append(segment)
        elif missing:
            fill(problem, bins, missing)
    if not whole:
        return Found(bins, problem.cost(bins))
    views = grids(mesh, problem, whole)
    search = Search(problem, bins, views, bound)
    if len(whole) * width <= LARGE_BLOCKS or width == 1:
        return balance(problem, search.run(effort))
    found = Search(problem, bins, [*views, *strips(views[0])], bound).run(0)
    parts = [_in_parts(problem, bins, view, effort // len(views)) for view in views]
    return balance(problem, min((found, *parts), key=lambda option: option.cost))


def _in_parts(problem: Problem, bins: list[int], grid: Grid, effort: int) -> Found:
    """Cluster by cluster, then the rows that are left over what room is left."""
    capacity = [b.capacity for b in problem.bins]
    for block in problem.movable:
        if bins[block] >= 0:
            capacity[bins[block]] -= 1
    filled = divide(problem, bins, grid, capacity, effort)
    left = [row for row in range(grid.rows) if filled[grid.cells[row * grid.columns]] == UNPLACED]
    if left:
        rest = [grid.cells[row * grid.columns + column] for row in left for column in range(grid.columns)]
        view = Grid(rest, grid.columns, grid.quantum, grid.row_weight, grid.column_weight)
        return Search(problem, filled, [view], 0.0).run(0)
    return Found(filled, problem.cost(filled))
