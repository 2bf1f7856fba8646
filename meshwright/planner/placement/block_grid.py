"""Arranges blocks as a grid, so that each rectangle of it touches few groups.

The natural grid has one row for each segment (complete replicas), with the segment's blocks as columns: rows are
pipelines, columns are data-parallel groups. Context- and expert-parallel groups that span blocks give further grids,
where each such group is consecutive cells of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.planner.placement.problem import Problem
from meshwright.planner.placement.rank_blocks import RankBlocks

_MAX_STRIPS = 8


@dataclass(frozen=True, slots=True)
class Grid:
    """Blocks in rows and columns.

    Attributes:
        cells: blocks, row by row.
        columns: length of a row.
        quantum: number of columns that belong together (a context- or expert-parallel group). Rectangles have a
            multiple of it as their width if possible.
        row_weight: cost of a row for each further location. `column_weight` is the same for a column.
    """

    cells: Sequence[int]
    columns: int
    quantum: int = 1
    row_weight: float = 1.0
    column_weight: float = 1.0

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.cells) // self.columns


def grids(mesh: RankBlocks, problem: Problem, segments: Sequence[int]) -> list[Grid]:
    """The grids of these segments' blocks to try, the natural one first."""
    width, inner = mesh.segment_blocks, mesh.context_blocks
    natural = [block for segment in segments for block in range(segment * width, (segment + 1) * width)]
    found = [_weighted(problem, natural, width, inner if width % inner == 0 else 1)]
    stride = mesh.expert_segments
    whole = len(segments) % stride == 0 and all(
        segments[i] == segments[i - i % stride] + i % stride for i in range(len(segments))
    )
    if stride > 1 and whole:
        cells = [
            segment * width + group + within
            for first in range(0, len(segments), stride)
            for group in range(0, width, inner)
            for segment in segments[first : first + stride]
            for within in range(inner)
        ]
        found.append(_weighted(problem, cells, width * stride, inner * stride))
    if inner > 1 and width % inner == 0 and width > inner:
        cells = [
            segment * width + stage + within
            for segment in segments
            for within in range(inner)
            for stage in range(0, width, inner)
        ]
        found.append(_weighted(problem, cells, width // inner, 1))
    return found


def strips(grid: Grid) -> list[Grid]:
    """The grid cut into vertical strips, which are stacked, and the grid transposed.

    Complete rows of these are rectangles of the grid. A large grid tries these shapes before any search.
    """
    found: list[Grid] = []
    for count in range(2, min(grid.columns, _MAX_STRIPS) + 1):
        width = grid.columns // count
        if grid.columns % count or width % grid.quantum:
            continue
        cells = [
            grid.cells[row * grid.columns + strip * width + within]
            for strip in range(count)
            for row in range(grid.rows)
            for within in range(width)
        ]
        found.append(Grid(cells, width, grid.quantum, grid.row_weight, grid.column_weight))
    if grid.rows > 1 and grid.columns > 1 and grid.quantum == 1:
        transposed = [
            grid.cells[row * grid.columns + column] for column in range(grid.columns) for row in range(grid.rows)
        ]
        found.append(Grid(transposed, grid.rows, 1, grid.column_weight, grid.row_weight))
    return found


def _weighted(problem: Problem, cells: Sequence[int], columns: int, quantum: int) -> Grid:
    """The grid with the weights of its rows and columns, from the groups that lie in one of either."""
    row_of = {block: position // columns for position, block in enumerate(cells)}
    rows = cols = 0.0
    for group in problem.undecided_groups:
        inside = [block for block in group.blocks[:2] if block in row_of]
        if len(inside) < 2:
            continue
        group_weight = sum(group.weights[-1:]) or sum(group.weights)
        if row_of[inside[0]] == row_of[inside[1]]:
            rows += group_weight
        else:
            cols += group_weight
    count = max(1, len(cells) // columns)
    return Grid(cells, columns, quantum, rows / count or 1e-6, cols / columns or 1e-6)
