"""Splits layers over pipeline stages by cost, not by count.

This is the outer level of Alpa (arXiv 2201.12023, section 5): contiguous layers are assigned to stages so that the
slowest stage is as fast as possible. With one kind of stage a bisection replaces Alpa's dynamic program: it halves the
interval of the slowest stage's cost, and fills stages greedily under each limit. Costs are estimated or measured. The
inner level, how a layer is split over the ranks of a stage, follows from the degrees.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from meshwright.figures import counted


def partition_layers(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Number of layers of each stage that minimizes the largest sum of costs, with the other sums close to their mean.

    Every stage has at least one layer.

    Args:
        costs: cost of each layer, in order, in any unit.
        stages: number of stages of the model.
        first: cost of what the first stage does in addition to its layers (the embedding).
        last: cost of what the last stage does in addition to its layers (final norm, logits and loss).

    Raises:
        ValueError: there are more stages than layers, or a cost is negative.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise ValueError(f"{counted(layers, 'layer')} cannot be split over {counted(stages, 'stage')}")
    if min(costs) < 0 or first < 0 or last < 0:
        raise ValueError("costs must not be negative")
    prefix_sums = [0.0, *accumulate(costs)]
    low, high = max(costs), prefix_sums[-1] + first + last
    for _ in range(60):
        limit = (low + high) / 2
        if _earliest_starts(prefix_sums, stages, limit, first, last) is None:
            low = limit
        else:
            high = limit
    return _near_mean_split(prefix_sums, stages, high, first, last)


def _earliest_starts(
    prefix_sums: Sequence[float], stages: int, limit: float, first: float, last: float
) -> list[int] | None:
    """The first layer at which each stage may begin, so that no stage from it on exceeds `limit` and each stage before
    has a layer; None where the first stage would exceed it.
    """
    end, earliest_starts = len(prefix_sums) - 1, [0] * stages
    for stage in range(stages - 1, -1, -1):
        cost_left = limit - (last if stage == stages - 1 else 0.0) - (first if stage == 0 else 0.0)
        first_layer = bisect_right(prefix_sums, prefix_sums[end] - cost_left - _slack(limit))
        begin = max(stage, min(first_layer, end))
        if begin == end or (stage == 0 and begin > 0):
            return None
        earliest_starts[stage] = end = begin
    return earliest_starts


def _near_mean_split(
    prefix_sums: Sequence[float], stages: int, limit: float, first: float, last: float
) -> tuple[int, ...]:
    """A split within `limit` in which each stage is as close as possible to its share of the rest."""
    earliest_starts = _earliest_starts(prefix_sums, stages, limit, first, last)
    if earliest_starts is None:
        raise ValueError("costs must be finite numbers")
    layers, begin, split = len(prefix_sums) - 1, 0, []
    for stage in range(stages - 1):
        edge_cost = first if stage == 0 else 0.0
        target = (
            prefix_sums[begin]
            + (prefix_sums[-1] - prefix_sums[begin] + edge_cost + last) / (stages - stage)
            - edge_cost
        )
        end = bisect_left(prefix_sums, target, begin + 1, layers)
        if target - prefix_sums[end - 1] <= prefix_sums[end] - target:
            end -= 1
        last_end = bisect_right(prefix_sums, prefix_sums[begin] + limit - edge_cost + _slack(limit)) - 1
        end = max(earliest_starts[stage + 1], begin + 1, min(end, last_end, layers - (stages - stage - 1)))
        split.append(end - begin)
        begin = end
    return (*split, layers - begin)


def _slack(limit: float) -> float:
    """What rounding may add to a sum."""
    return 1e-12 * limit + 1e-300
