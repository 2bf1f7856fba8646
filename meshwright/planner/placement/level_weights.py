"""Weights of the search that make crossings of required and preferred levels cost more than all others together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from meshwright.planner.placement.group_levels import JOB, GroupLevels, LevelRule
from meshwright.planner.placement.problem import WeightedGroup
from meshwright.planner.placement.rank_blocks import Dimension, RankBlocks
from meshwright.planner.placement.weights import Weights

_MAX_RATIO = 1e6
"""Largest ratio between the weights of required and preferred levels: sums must stay exact enough to compare."""


def search_weights(rules: GroupLevels, mesh: RankBlocks, levels: Sequence[str], weights: Weights) -> Weights:
    """The weights with a penalty for each level that groups of a dimension must not, or should not, leave.

    Args:
        rules: the levels.
        mesh: the groups.
        levels: the tree's levels, from the one that a block must not leave.
        weights: cost of each further location of a group.
    """
    penalties = _penalties(rules, mesh, levels, weights)
    return Weights(
        {
            dimension: {
                level: weights.of(dimension, level) + penalties[dimension.value].get(level, 0.0) for level in levels
            }
            for dimension in Dimension
        }
    )


def search_groups(rules: GroupLevels, mesh: RankBlocks, levels: Sequence[str], weights: Weights) -> list[WeightedGroup]:
    """The group of all blocks, if the job as a whole must not, or should not, leave a level."""
    penalties = _penalties(rules, mesh, levels, weights)[JOB]
    costs = tuple(penalties.get(level, 0.0) for level in levels)
    return [WeightedGroup(tuple(range(mesh.blocks)), costs)] if any(costs) else []


def _penalties(
    rules: GroupLevels, mesh: RankBlocks, levels: Sequence[str], weights: Weights
) -> defaultdict[str, dict[str, float]]:
    """Dimension -> level -> cost of each further location, above that of the traffic."""
    most = sum(
        (len(group.blocks) - 1) * group.count * weights.of(group.dimension, level)
        for group in mesh.groups()
        for level in levels
    )
    preferred = 2.0 * most or 1.0
    crossings = sum(_most_crossings(rule) for rule in rules.preferred)
    required = preferred * min(_MAX_RATIO, 2.0 + crossings)
    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for stated, penalty in ((rules.preferred, preferred), (rules.required, required)):
        for rule in stated:
            if rule.level in levels:
                costs = found[rule.dimension]
                costs[rule.level] = costs.get(rule.level, 0.0) + penalty
    return found


def _most_crossings(rule: LevelRule) -> int:
    return sum(len(blocks) - 1 for blocks in rule.groups)
