"""A lower bound on the cost of any placement, from the lowest cost of a bin with u blocks.

Take two families of groups, rows and columns, where a row and a column share at most one block (pipelines and
data-parallel groups do). A bin with a rows and b columns has at most a * b blocks, so u blocks in one bin cost at least
f(u) = min(w_row * a + w_column * b : a * b >= u), which is half a perimeter. The lowest cost of spreading all blocks
over the capacities is a knapsack over f. It is solved here in its Lagrangian relaxation, in O(distinct capacities), for
any size. Each level of the fabric is bounded separately, and the bounds are added, as the costs are.

Bounds from the linear relaxation of the assignment are useless here, because they are negative. This one is usually
exact, or off by a few percent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import ceil

from meshwright.planner.placement.problem import Problem, WeightedGroup

_EXACT_STEPS = 3_000_000
_TOLERANCE = 1e-9


def lower_bound(problem: Problem) -> float:
    """A cost that every placement of all blocks has at least. Fixed blocks may move, which only lowers the bound."""
    total = 0.0
    for level in range(problem.levels):
        families = _families(problem.groups, level)
        if not families:
            continue
        total += _level_bound(families, _capacities(problem, level), problem.size)
    return total


class _Family:
    """Disjoint groups of equal weight at one level, such as all pipelines."""

    def __init__(self, groups: Sequence[WeightedGroup], weight: float) -> None:
        self.weight = weight
        self.count = len(groups)
        self.sizes = [len(group.blocks) for group in groups]
        self.group_of = {block: index for index, group in enumerate(groups) for block in group.blocks}
        self.members = len(self.group_of)

    @property
    def largest(self) -> int:
        return max(self.sizes)


def _families(groups: Sequence[WeightedGroup], level: int) -> list[_Family]:
    """Groups divided into families of disjoint groups with equal weights. Groups that overlap start another family."""
    by_weight: dict[tuple[float, int], list[list[WeightedGroup]]] = {}
    taken: dict[int, set[int]] = {}
    for group in groups:
        if not group.weights[level]:
            continue
        rows = by_weight.setdefault((group.weights[level], len(group.blocks)), [])
        for row in rows:
            if taken[id(row)].isdisjoint(group.blocks):
                row.append(group)
                taken[id(row)].update(group.blocks)
                break
        else:
            rows.append([group])
            taken[id(rows[-1])] = set(group.blocks)
    return [_Family(row, weight) for (weight, _), rows in by_weight.items() for row in rows]


def _capacities(problem: Problem, level: int) -> Counter[int]:
    """Capacity of a location of a level, including fixed blocks -> number of locations with that capacity."""
    room: dict[int, int] = {}
    isolated_blocks = 0
    held = Counter(j for j in problem.fixed if j >= 0)
    for j, found in enumerate(problem.bins):
        if level == 0 and found.alone:
            isolated_blocks += found.capacity
        else:
            room[found.path[level]] = room.get(found.path[level], 0) + found.capacity + held[j]
    counted = Counter(size for size in room.values() if size)
    if isolated_blocks:
        counted[1] += isolated_blocks
    return counted


def _level_bound(families: Sequence[_Family], capacities: Mapping[int, int], size: int) -> float:
    """The best bound of any pair of families, plus the separate bounds of the other families."""
    alone = [_single_family_bound(family, capacities) for family in families]
    best = sum(alone)
    whole = [f for f in families if f.members == size]
    for row, column in combinations(whole, 2):
        max_overlap = _max_overlap(row, column)
        if max_overlap is None:
            continue
        rest = sum(b for family, b in zip(families, alone, strict=True) if family not in (row, column))
        pieces = _pair_bound(row, column, max_overlap, capacities, size)
        best = max(best, rest + pieces - row.weight * row.count - column.weight * column.count)
    return best


def _single_family_bound(family: _Family, capacities: Mapping[int, int]) -> float:
    """Extra locations if each group may use every location fully: the smallest number that covers all blocks."""
    size = family.largest
    pieces: Counter[int] = Counter()
    for room, count in capacities.items():
        pieces[size] += room // size * count
        if room % size:
            pieces[room % size] += count
    missing, used = family.members, 0
    for piece in sorted(pieces, reverse=True):
        if missing <= 0:
            break
        taken = min(pieces[piece], ceil(missing / piece))
        used += taken
        missing -= taken * piece
    return family.weight * max(0, used - family.count)


def _max_overlap(row: _Family, column: _Family) -> int | None:
    """Largest number of blocks that a row and a column share. None if it is too large for a useful bound."""
    overlaps = Counter((row.group_of[block], column.group_of[block]) for block in row.group_of)
    most = max(overlaps.values())
    return most if most < min(row.largest, column.largest) else None


def _pair_bound(row: _Family, column: _Family, max_overlap: int, capacities: Mapping[int, int], size: int) -> float:
    """The least of sum f(u_j) over all ways to spread the blocks."""
    curve = _curve(row, column, max_overlap, max(capacities))
    steps = sum(count * (room + 1) for room, count in capacities.items()) * size
    if steps <= _EXACT_STEPS:
        return _knapsack(curve, capacities, size)
    return _relaxed(curve, capacities, size)


def _curve(row: _Family, column: _Family, max_overlap: int, most: int) -> list[float]:
    """f(u) for u = 0..most: the lowest cost of a rectangle with u blocks, over all rectangles."""
    curve = [float("inf")] * (most + 1)
    for rows in range(1, min(row.count, most) + 1):
        for columns in range(1, min(column.count, ceil(most / (rows * max_overlap))) + 1):
            held = min(most, rows * columns * max_overlap)
            curve[held] = min(curve[held], row.weight * rows + column.weight * columns)
    for u in range(most - 1, 0, -1):
        curve[u] = min(curve[u], curve[u + 1])
    curve[0] = 0.0
    return curve


def _knapsack(curve: Sequence[float], capacities: Mapping[int, int], size: int) -> float:
    """Exact: dynamic programming over locations and blocks placed so far."""
    infinite = float("inf")
    best = [0.0] + [infinite] * size
    for room, count in capacities.items():
        options = list(enumerate(curve[: room + 1]))
        for _ in range(count):
            best = [min(best[n - u] + cost for u, cost in options if u <= n) for n in range(size + 1)]
    return best[size]


def _relaxed(curve: Sequence[float], capacities: Mapping[int, int], size: int) -> float:
    """Lagrangian: max over p of p * size + sum of min over u of f(u) - p * u; every p gives a valid bound."""

    def at(price: float) -> float:
        saved = sum(
            count * min(curve[u] - price * u for u in range(min(room, size) + 1)) for room, count in capacities.items()
        )
        return price * size + saved

    prices = sorted({curve[u] / u for u in _ends(capacities, size)} | set(_slopes(curve)))
    low, high = 0, len(prices) - 1
    while high - low > 2:  # the dual is concave in the multiplier
        third = (high - low) // 3
        if at(prices[low + third]) < at(prices[high - third]):
            low += third
        else:
            high -= third
    return max(max(at(price) for price in prices[low : high + 1]), 0.0) - _TOLERANCE


def _ends(capacities: Iterable[int], size: int) -> set[int]:
    return {min(room, size) for room in capacities if room}


def _slopes(curve: Sequence[float]) -> list[float]:
    """Slopes of f between any two of its points that can be a Lagrange multiplier."""
    if len(curve) > 200:
        return [(curve[u] - curve[0]) / u for u in range(1, len(curve))]
    return [(curve[v] - curve[u]) / (v - u) for u in range(len(curve)) for v in range(u + 1, len(curve))]
