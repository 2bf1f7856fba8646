"""Solving one problem: partly placed replicas first, then the whole ones by search, then evening out.

A small problem is searched as a whole. A large one is constructed in the shapes that large grids want, and in parts
that are searched each by itself; the better of the two is taken.
"""

from __future__ import annotations

from meshwright.planner.placement.block_grid import Grid, grids, strips
from meshwright.planner.placement.decompose import decompose
from meshwright.planner.placement.local_search import Assignment, LocalSearch
from meshwright.planner.placement.options import LARGE_BLOCKS
from meshwright.planner.placement.place_missing import place_missing
from meshwright.planner.placement.problem import UNPLACED, Problem
from meshwright.planner.placement.rack_balance import balance_racks
from meshwright.planner.placement.rank_blocks import RankBlocks


def solve(mesh: RankBlocks, problem: Problem, bound: float, effort: int) -> Assignment:
    """A bin for every block; fixed blocks keep theirs.

    Args:
        mesh: how blocks form replicas.
        problem: groups and bins, which must have room for all blocks.
        bound: a cost no placement can be below, at which the search stops.
        effort: see `PlacingOptions.effort`.
    """
    bins = list(problem.fixed)
    width = mesh.segment_blocks
    whole_segments: list[int] = []
    for segment in range(mesh.blocks // width):
        missing = [block for block in range(segment * width, (segment + 1) * width) if bins[block] == UNPLACED]
        if len(missing) == width:
            whole_segments.append(segment)
        elif missing:
            place_missing(problem, bins, missing)
    if not whole_segments:
        return Assignment(bins, problem.cost(bins))
    candidate_grids = grids(mesh, problem, whole_segments)
    search = LocalSearch(problem, bins, candidate_grids, bound)
    if len(whole_segments) * width <= LARGE_BLOCKS or width == 1:
        return balance_racks(problem, search.run(effort))
    constructed = LocalSearch(problem, bins, [*candidate_grids, *strips(candidate_grids[0])], bound).run(0)
    parts = [_solve_in_clusters(problem, bins, view, effort // len(candidate_grids)) for view in candidate_grids]
    return balance_racks(problem, min((constructed, *parts), key=lambda option: option.cost))


def _solve_in_clusters(problem: Problem, bins: list[int], grid: Grid, effort: int) -> Assignment:
    """Cluster by cluster, then the rows that are left over what room is left."""
    capacity = [b.capacity for b in problem.bins]
    for block in problem.unplaced:
        if bins[block] >= 0:
            capacity[bins[block]] -= 1
    partial = decompose(problem, bins, grid, capacity, effort)
    rows_left = [row for row in range(grid.rows) if partial[grid.cells[row * grid.columns]] == UNPLACED]
    if rows_left:
        cells_left = [grid.cells[row * grid.columns + column] for row in rows_left for column in range(grid.columns)]
        view = Grid(cells_left, grid.columns, grid.quantum, grid.row_weight, grid.column_weight)
        return LocalSearch(problem, partial, [view], 0.0).run(0)
    return Assignment(partial, problem.cost(partial))
