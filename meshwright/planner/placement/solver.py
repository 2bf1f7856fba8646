"""Solves one problem: completes partly placed replicas, then searches for the others, then balances racks.

A small problem is searched as one. A large one is constructed in two ways: in the shapes that suit large grids, and in
parts that are searched separately. The result with the lower cost is used. Single missing blocks, for example after a
node was lost, are placed one after the other, each where it adds least to the cost of its groups. Blocks that are
already placed never move.

At equal cost racks are balanced: 16 + 16 is better than 14 + 18, because in an uneven split the uplinks of the fullest
rack are the slowest of every ring. Only all blocks that a group has in one bin, or a part of them, move together. They
move only to bins in use that have capacity, and only if the cost stays the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from meshwright.planner.placement.block_grid import Grid, grids, strips
from meshwright.planner.placement.decompose import decompose
from meshwright.planner.placement.local_search import Assignment, LocalSearch
from meshwright.planner.placement.options import LARGE_BLOCKS
from meshwright.planner.placement.problem import UNPLACED, Problem
from meshwright.planner.placement.rank_blocks import RankBlocks


def solve(mesh: RankBlocks, problem: Problem, bound: float, effort: int) -> Assignment:
    """Return a bin for every block. Fixed blocks stay in their bins.

    Args:
        mesh: how blocks form replicas.
        problem: groups and bins. All blocks must fit in the bins.
        bound: a lower bound on the cost, at which the search stops.
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
    """Solve cluster by cluster, then place the rows that fit in no cluster on the remaining capacity."""
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


_NEAR = 1e-9


def place_missing(problem: Problem, bins: list[int], blocks: Sequence[int]) -> None:
    """Write a bin for each of `blocks`, which belong together, into `bins`.

    At equal cost a unit with capacity for all remaining blocks comes first, then the tightest bin.
    """
    free = [b.capacity for b in problem.bins]
    for block in problem.unplaced:
        if bins[block] >= 0:
            free[bins[block]] -= 1
    for position, block in enumerate(blocks):
        added_costs = _added_costs(problem, bins, block)
        remaining = len(blocks) - position
        unit_capacity: dict[int, int] = {}
        for j in problem.open_bins:
            unit_capacity[problem.unit[j]] = unit_capacity.get(problem.unit[j], 0) + free[j]
        candidates = [j for j in problem.open_bins if free[j] > 0]
        lowest_cost = min(added_costs[j] for j in candidates)
        near_lowest = [j for j in candidates if added_costs[j] <= lowest_cost + _NEAR]
        chosen = min(near_lowest, key=lambda j: (unit_capacity[problem.unit[j]] < remaining, free[j], j))
        bins[block] = chosen
        free[chosen] -= 1


def _added_costs(problem: Problem, bins: Sequence[int], block: int) -> list[float]:
    """For each bin: the cost that is added for the block's groups if the block is placed there."""
    added_costs = [0.0] * len(problem.bins)
    for index in problem.groups_of[block]:
        group = problem.groups[index]
        used = {bins[other] for other in group.blocks if bins[other] >= 0 and other != block}
        if not used:
            continue
        for level, weight in enumerate(group.weights):
            places = problem.places[level]
            touched = {places[j] for j in used}
            for j in problem.open_bins:
                if places[j] not in touched or (level == 0 and problem.alone[j]):
                    added_costs[j] += weight
    return added_costs


_TOLERANCE = 1e-9
_MAX_WORK = 400_000
_MAX_MOVES = 256


def balance_racks(problem: Problem, assignment: Assignment) -> Assignment:
    """Return the assignment, or a more balanced one with the same cost."""
    bins = list(assignment.bins)
    moves_left = min(_MAX_MOVES, _MAX_WORK // max(1, problem.size))
    cost = assignment.cost
    improved = True
    while improved and moves_left > 0:
        improved = False
        for target, chunk in _moves(problem, bins):
            if moves_left <= 0:
                break
            moves_left -= 1
            trial = list(bins)
            for block in chunk:
                trial[block] = target
            trial_cost = problem.cost(trial)
            if trial_cost < cost - _TOLERANCE or (
                trial_cost <= cost + _TOLERANCE and problem.tie_breaker(trial) < problem.tie_breaker(bins)
            ):
                bins, cost, improved = trial, trial_cost, True
                break
    return Assignment(bins, cost)


def _moves(problem: Problem, bins: list[int]) -> list[tuple[int, tuple[int, ...]]]:
    """(bin, blocks to move there) that balance two bins in use. The largest difference comes first."""
    used = Counter(bins[block] for block in problem.unplaced)
    targets = [j for j in used if problem.bins[j].capacity > used[j]]
    if not targets or len(used) < 2:
        return []
    chunks = _movable_chunks(problem, bins)
    assignment: list[tuple[int, int, tuple[int, ...]]] = []
    for target in sorted(targets, key=lambda j: (used[j], j))[:4]:
        free = problem.bins[target].capacity - used[target]
        for source in sorted(used, key=lambda j: (-used[j], j))[:4]:
            difference = used[source] - used[target]
            assignment += [
                (difference - len(chunk), target, chunk)
                for chunk in chunks[source]
                if len(chunk) <= free and len(chunk) < difference
            ]
    assignment.sort(key=lambda move: (-move[0], move[2]))
    return [(target, chunk) for _, target, chunk in assignment]


def _movable_chunks(problem: Problem, bins: list[int]) -> dict[int, list[tuple[int, ...]]]:
    """For each bin: the parts of groups that are in it, one of each size."""
    free_to_move = set(problem.unplaced)
    sizes: defaultdict[int, dict[int, tuple[int, ...]]] = defaultdict(dict)
    for group in problem.undecided_groups:
        parts: defaultdict[int, list[int]] = defaultdict(list)
        for block in group.blocks:
            if block in free_to_move:
                parts[bins[block]].append(block)
        for j, blocks in parts.items():
            sizes[j].setdefault(len(blocks), tuple(blocks))
    for block in problem.unplaced:
        sizes[bins[block]].setdefault(1, (block,))
    return {j: list(assignment.values()) for j, assignment in sizes.items()}
