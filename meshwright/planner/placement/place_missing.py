"""Placing single blocks beside the groups they belong to: what a lost node needs.

One block after the other goes where its groups pay least for it. What is already placed never moves.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.planner.placement.problem import Problem

_NEAR = 1e-9


def place_missing(problem: Problem, bins: list[int], blocks: Sequence[int]) -> None:
    """Writes a bin for each of `blocks`, which belong together, into `bins`.

    Between equal costs: rather a unit with room for all that are left, then the tightest bin.
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
        cheapest = [j for j in candidates if added_costs[j] <= lowest_cost + _NEAR]
        chosen = min(cheapest, key=lambda j: (unit_capacity[problem.unit[j]] < remaining, free[j], j))
        bins[block] = chosen
        free[chosen] -= 1


def _added_costs(problem: Problem, bins: Sequence[int], block: int) -> list[float]:
    """For each bin: what the block's groups pay more when it goes there."""
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
