"""Splits large problems into clusters of bins that take entire rows, and searches each cluster separately.

The cost of a bin is the perimeter of its blocks (see `lower_bound`), independent of other bins. Clusters that share no
row hardly affect each other, so solving them separately loses little. Clusters with the same capacities are solved
once. Only the few rows that fit in no cluster are placed on the remaining bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.planner.placement.block_grid import Grid
from meshwright.planner.placement.local_search import LocalSearch
from meshwright.planner.placement.problem import UNPLACED, Bin, Problem, WeightedGroup

_CLUSTER_ROWS = 6
_CLUSTER_BINS = 12


@dataclass(frozen=True, slots=True)
class _Cluster:
    """Bins that together have capacity for a number of entire rows."""

    bins: tuple[int, ...]
    rows: int


def decompose(problem: Problem, start: Sequence[int], grid: Grid, capacity: Sequence[int], effort: int) -> list[int]:
    """Assign the grid's rows to bins, cluster by cluster. Rows that fit in no cluster stay unplaced.

    Args:
        problem: the full problem.
        start: block -> bin so far.
        grid: the blocks to place.
        capacity: free capacity of each bin.
        effort: total number of assignments of one block to try.
    """
    bins = list(start)
    clusters = _clusters(problem, grid, capacity)
    solutions: dict[tuple[object, ...], list[int]] = {}
    placed = 0
    effort_per_block = effort // max(1, grid.rows * grid.columns)
    for cluster in clusters:
        rows = min(cluster.rows, grid.rows - placed)
        if not rows:
            break
        ordered = sorted(cluster.bins, key=lambda j: (-capacity[j], problem.bins[j].path[1:], j))
        shape = (rows, *((capacity[j], problem.alone[j]) for j in ordered), *_siblings(problem, ordered))
        if shape not in solutions:
            solutions[shape] = _solve_cluster(
                problem, grid, placed, rows, ordered, capacity, effort_per_block * rows * grid.columns
            )
        first = placed * grid.columns
        for cell, local in enumerate(solutions[shape]):
            bins[grid.cells[first + cell]] = ordered[local]
        placed += rows
    return bins


def _siblings(problem: Problem, bins: Sequence[int]) -> list[int]:
    """Which bins share a location, level by level. Clusters that are equal in this are equal in everything."""
    found: list[int] = []
    for column in problem.places:
        numbers: dict[int, int] = {}
        found += [numbers.setdefault(column[j], len(numbers)) for j in bins]
    return found


def _clusters(problem: Problem, grid: Grid, capacity: Sequence[int]) -> list[_Cluster]:
    """Neighboring bins, up to a few rows each. The tightest location in which the full grid fits comes first."""
    ordered = _bins_by_place(problem, grid, capacity)
    found: list[_Cluster] = []
    members: list[int] = []
    room = 0
    for position, j in enumerate(ordered):
        members.append(j)
        room += capacity[j]
        last = position + 1 == len(ordered)
        last_in_place = last or problem.bins[j].path[1:] != problem.bins[ordered[position + 1]].path[1:]
        full = room // grid.columns >= _CLUSTER_ROWS or len(members) >= _CLUSTER_BINS
        if (full or last_in_place) and room >= grid.columns:
            found.append(_Cluster(tuple(members), room // grid.columns))
            members, room = [], 0
    return found


def _bins_by_place(problem: Problem, grid: Grid, capacity: Sequence[int]) -> list[int]:
    """Open bins by location. At each level the tightest location where the grid fits comes first, else the largest."""
    needed = grid.rows * grid.columns
    room: list[dict[int, int]] = []
    for column in problem.places[1:]:
        capacity_at: dict[int, int] = {}
        for place, free in zip(column, capacity, strict=True):
            capacity_at[place] = capacity_at.get(place, 0) + max(0, free)
        room.append(capacity_at)

    def rank(j: int) -> tuple[tuple[bool, int, int], ...]:
        path = problem.bins[j].path[1:]
        found = [
            (capacity_at[p] < needed, capacity_at[p] if capacity_at[p] >= needed else -capacity_at[p], p)
            for capacity_at, p in zip(room, path, strict=True)
        ]
        return (*found[::-1], (False, -capacity[j], j))

    return sorted((j for j in problem.open_bins if capacity[j] > 0), key=rank)


def _solve_cluster(
    problem: Problem,
    grid: Grid,
    first_row: int,
    rows: int,
    bins: Sequence[int],
    capacity: Sequence[int],
    effort: int,
) -> list[int]:
    """The cluster's own search: for each cell of its rows the position in `bins`."""
    cells = grid.cells[first_row * grid.columns : (first_row + rows) * grid.columns]
    number = {block: cell for cell, block in enumerate(cells)}
    groups: list[WeightedGroup] = []
    for index in sorted({i for block in cells for i in problem.groups_of[block]}):
        group = problem.groups[index]
        inside = tuple(number[block] for block in group.blocks if block in number)
        if len(inside) > 1:
            groups.append(WeightedGroup(inside, group.weights))
    part = Problem(
        size=len(cells),
        groups=groups,
        bins=[Bin(capacity[j], problem.bins[j].path, problem.bins[j].alone) for j in bins],
        fixed=[UNPLACED] * len(cells),
        unit=[problem.unit[j] for j in bins],
    )
    local = Grid(range(len(cells)), grid.columns, grid.quantum, grid.row_weight, grid.column_weight)
    return LocalSearch(part, part.fixed, [local], 0.0).run(effort).bins
