"""Divides a grid into rectangles, one per bin. Every placement is constructed this way.

A bin with a capacity of u blocks has the fewest groups if its blocks form an almost square rectangle (weighted: see
`lower_bound`). Each bin takes a rectangle off a corner of the remaining region, which leaves two smaller regions. A
region that fits in one bin mostly goes to the tightest such bin. It is sometimes divided nevertheless, more often if
its blocks are apart in that bin, so that bins with little capacity are used too. All choices come from a list of keys
in [0, 1). Equal keys give equal placements, and changing a few keys changes a placement a little, which the search
depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from random import Random

from meshwright.planner.placement.block_grid import Grid
from meshwright.planner.placement.problem import Problem

FULL_ROWS = 0.1
"""Shape key: as many entire rows as fit in the bin."""
NEAR_SQUARE = 0.6
"""Shape key: the rectangle with the least perimeter for each block."""
_ROWS = 0.4
_IN_TURN_BELOW = 0.7
"""Keys up to this take the next bin with capacity. Larger ones name a bin."""
_WHOLE_BELOW = 0.9
"""Keys up to this leave a region whole that fits in one bin, unless its blocks are apart there."""
_KEYS_PER_STEP = 4


class RandomKeys:
    """The choices of one construction. They are drawn when they are first needed.

    Attributes:
        values: the numbers, in the order of their use.
        used: how many of them the last construction used.
    """

    def __init__(self, random: Random, values: Sequence[float] = ()) -> None:
        self.values = list(values)
        self.used = 0
        self._random = random

    def at_least(self, count: int) -> None:
        """Append random keys until the list has the given length."""
        draw = self._random.random
        self.values += [draw() for _ in range(count - len(self.values))]

    def changed(self) -> RandomKeys:
        """Return the same choices with one to three of them changed."""
        draw = self._random.random
        values = self.values[: self.used]
        for _ in range(int(draw() * 3) + 1):
            values[int(draw() * len(values))] = draw()
        return RandomKeys(self._random, values)


class RectanglePacker:
    """Constructs assignments of one grid's blocks into a problem's open bins."""

    def __init__(self, problem: Problem, grid: Grid, capacity: Sequence[int]) -> None:
        """`capacity` is the number of the grid's blocks that still fit in each bin."""
        self._grid = grid
        self._capacity = capacity
        self._open = [j for j, room in enumerate(capacity) if room > 0]
        self._alone = problem.alone
        self._largest = max((capacity[j] for j in self._open), default=0)
        self._places_above = [list(dict.fromkeys(column[j] for j in self._open)) for column in problem.places[1:]]
        self._paths = [problem.bins[j].path[1:] for j in self._open]
        self._whole_grid = list(grid.cells) == list(range(problem.size))
        self._shapes = lru_cache(maxsize=4096)(self._ranked_shapes)

    @property
    def order_keys(self) -> int:
        """Number of keys for the order of bins: one for each location above the closest level and one for each bin."""
        return sum(len(places) for places in self._places_above) + len(self._open)

    def seed(self, rank: Callable[[int, int], float], shape: float) -> list[float]:
        """Keys for a given order: `rank(level, place)` for locations, level 0 for bins, and one shape for all."""
        keys = [rank(level, place) for level, places in enumerate(self._places_above, start=1) for place in places]
        keys += [rank(0, j) for j in self._open]
        return keys + [0.0, shape, 0.0, 0.0] * (2 * len(self._open))

    def pack(self, keys: RandomKeys, into: list[int]) -> None:
        """Write the bin of each of the grid's blocks into `into`."""
        cell_bins = self._packed(keys)
        if self._whole_grid:
            into[:] = cell_bins
        else:
            for block, j in zip(self._grid.cells, cell_bins, strict=True):
                into[block] = j

    def _packed(self, keys: RandomKeys) -> list[int]:
        """The bin of each cell, row by row."""
        order = self._ordered(keys)
        free = list(self._capacity)
        columns = self._grid.columns
        cell_bins = [0] * len(self._grid.cells)
        at, turn = self.order_keys, 0
        stack = [(0, self._grid.rows, 0, columns)]
        while stack:
            top, bottom, left, right = stack.pop()
            size = (bottom - top) * (right - left)
            if not size:
                continue
            if len(keys.values) < at + _KEYS_PER_STEP:
                keys.at_least(at + 16 * _KEYS_PER_STEP)
            out_of_turn, shape, below, swap = keys.values[at : at + _KEYS_PER_STEP]
            at += _KEYS_PER_STEP
            height, width = bottom - top, right - left
            j = self._bin_for(out_of_turn, size, order, free) if size <= self._largest else -1
            limit = _IN_TURN_BELOW if j < 0 or self._alone[j] else _WHOLE_BELOW
            if j < 0 or out_of_turn > limit:
                turn = self._next_bin(out_of_turn, limit, turn, order, free)
                j = order[turn]
                turn = (turn + 1) % len(order)
                height, width = self._shape(shape, height, width, free[j])
            piece = [j] * width
            for start in range(top * columns + left, (top + height) * columns + left, columns):
                cell_bins[start : start + width] = piece
            free[j] -= height * width
            if height * width == size:
                continue
            if below < 0.5:
                rest = [(top + height, bottom, left, right), (top, top + height, left + width, right)]
            else:
                rest = [(top + height, bottom, left, left + width), (top, bottom, left + width, right)]
            stack += rest if swap < 0.5 else rest[::-1]
        keys.used = at
        return cell_bins

    def _ordered(self, keys: RandomKeys) -> list[int]:
        """Bins in order: locations of the widest level by their keys, inside each the next level, finally the bins."""
        keys.at_least(self.order_keys)
        values = iter(keys.values)
        drawn = [dict(zip(places, values, strict=False)) for places in self._places_above]
        if not drawn:
            return [j for _, j in sorted(zip(values, self._open, strict=False))]
        ranks = []
        for j, above in zip(self._open, self._paths, strict=True):
            ranks.append(([places[p] for places, p in zip(drawn, above, strict=True)][::-1], next(values), j))
        ranks.sort()
        return [rank[-1] for rank in ranks]

    @staticmethod
    def _next_bin(key: float, limit: float, turn: int, order: Sequence[int], free: Sequence[int]) -> int:
        """The next bin with capacity, or sometimes another one."""
        if key > limit:
            turn = int((key - limit) / (1 - limit) * len(order))
        while not free[order[turn]]:
            turn = (turn + 1) % len(order)
        return turn

    @staticmethod
    def _bin_for(key: float, size: int, order: Sequence[int], free: Sequence[int]) -> int:
        """A bin with capacity for the blocks: mostly the tightest, sometimes a larger one. -1 if there is none."""
        large_enough = [j for j in order if free[j] >= size]
        if not large_enough:
            return -1
        skip = int(key**3 * len(large_enough))
        if not skip:
            return min(large_enough, key=free.__getitem__)
        return sorted(large_enough, key=free.__getitem__)[skip]

    def _shape(self, key: float, rows: int, columns: int, room: int) -> tuple[int, int]:
        """Rows and columns of the rectangle to cut off a region."""
        if columns <= room and key < _ROWS:
            return min(rows, room // columns), columns
        if rows <= room and key < NEAR_SQUARE:
            return rows, min(columns, room // rows)
        shapes = self._shapes(min(rows, room), min(columns, room), room)
        within = max(0.0, (key - NEAR_SQUARE) / (1 - NEAR_SQUARE))
        return shapes[int(within * within * len(shapes))]

    def _ranked_shapes(self, rows: int, columns: int, room: int) -> list[tuple[int, int]]:
        """The shapes with the least perimeter for each block, best first."""
        quantum, ranked_shapes = self._grid.quantum, []
        for height in range(1, rows + 1):
            width = min(columns, room // height)
            if not width:
                break
            if width > quantum:
                width -= width % quantum
            perimeter = self._grid.row_weight * height + self._grid.column_weight * width
            ranked_shapes.append((perimeter / (height * width), -height * width, height, width))
        return [(height, width) for _, _, height, width in sorted(ranked_shapes)[:5]]
