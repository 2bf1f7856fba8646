"""Layers of each pipeline stage by cost, not by count.

The outer level of Alpa's two (arXiv 2201.12023, section 5): contiguous layers are dealt to stages so that the slowest
stage is as fast as can be. With one kind of stage Alpa's dynamic program has a short cut: halve the interval of the
slowest stage's cost, filling stages greedily under each limit. Costs are estimated or profiled. The inner level, how a
layer is split over the ranks of a stage, is what the degrees of a shape say.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate


def balanced(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Layers of each stage so that the largest sum of costs is least, and the others near their mean; every stage has
    at least one.

    Args:
        costs: of each layer, in order; any unit.
        stages: of the model.
        first: cost of what the first stage does beside its layers (the embedding).
        last: cost of what the last stage does beside its layers (final norm, logits and loss).

    Raises:
        ValueError: there are more stages than layers, or a cost is negative.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be split over {stages} stages")
    if min(costs) < 0 or first < 0 or last < 0:
        raise ValueError("costs must not be negative")
    summed = [0.0, *accumulate(costs)]
    low, high = max(costs), summed[-1] + first + last
    for _ in range(60):
        limit = (low + high) / 2
        if _begins(summed, stages, limit, first, last) is None:
            low = limit
        else:
            high = limit
    return _near_the_mean(summed, stages, high, first, last)


def _begins(summed: Sequence[float], stages: int, limit: float, first: float, last: float) -> list[int] | None:
    """The first layer at which each stage may begin, so that no stage from it on exceeds `limit` and each stage before
    has a layer; None where the first stage would exceed it.
    """
    end, begins = len(summed) - 1, [0] * stages
    for stage in range(stages - 1, -1, -1):
        room = limit - (last if stage == stages - 1 else 0.0) - (first if stage == 0 else 0.0)
        lowest = bisect_right(summed, summed[end] - room - _slack(limit))
        begin = max(stage, min(lowest, end))
        if begin == end or (stage == 0 and begin > 0):
            return None
        begins[stage] = end = begin
    return begins


def _near_the_mean(summed: Sequence[float], stages: int, limit: float, first: float, last: float) -> tuple[int, ...]:
    """A split within `limit` in which each stage takes its part of what is left, as nearly as can be."""
    begins = _begins(summed, stages, limit, first, last)
    if begins is None:
        raise ValueError("costs must be finite numbers")
    layers, begin, split = len(summed) - 1, 0, []
    for stage in range(stages - 1):
        beside = first if stage == 0 else 0.0
        goal = summed[begin] + (summed[-1] - summed[begin] + beside + last) / (stages - stage) - beside
        end = bisect_left(summed, goal, begin + 1, layers)
        if goal - summed[end - 1] <= summed[end] - goal:
            end -= 1
        furthest = bisect_right(summed, summed[begin] + limit - beside + _slack(limit)) - 1
        end = max(begins[stage + 1], begin + 1, min(end, furthest, layers - (stages - stage - 1)))
        split.append(end - begin)
        begin = end
    return (*split, layers - begin)


def _slack(limit: float) -> float:
    """What rounding may add to a sum."""
    return 1e-12 * limit + 1e-300
