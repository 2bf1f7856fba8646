"""Evening out racks at equal cost: 16 + 16 rather than 14 + 18.

An uneven split makes the fullest rack's uplinks the slowest of every ring. Only whole parts of a group that lie
together in one bin move, only to bins in use that have room, and only where nobody pays for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from meshwright.planner.placement.local_search import Assignment
from meshwright.planner.placement.problem import Problem

_TOLERANCE = 1e-9
_MAX_WORK = 400_000
_MAX_MOVES = 256


def balance_racks(problem: Problem, assignment: Assignment) -> Assignment:
    """The same or a more even placement of the same cost."""
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
    """(bin, blocks to move there) that make two bins in use more even; the widest difference first."""
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
    """For each bin: parts of groups that lie in it, one of each size."""
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
