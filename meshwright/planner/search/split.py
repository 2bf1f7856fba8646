"""Layers of each pipeline stage by cost, not by count.

The outer level of Alpa's two (arXiv 2201.12023, section 5): contiguous layers are dealt to stages so that the slowest
stage is as fast as can be. With one kind of stage Alpa's dynamic program has a short cut: halve the interval of the
slowest stage's cost, filling stages greedily under each limit. Costs are estimated or profiled. The inner level, how a
layer is split over the ranks of a stage, is what the degrees of a shape say.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate


def balanced(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Layers of each stage so that the largest sum of costs is least; every stage has at least one.

    Args:
        costs: of each layer, in order; any unit.
        stages: pipeline ranks.
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
        if _greedy(summed, stages, limit, first, last) is None:
            low = limit
        else:
            high = limit
    split = _greedy(summed, stages, high, first, last)
    if split is None:
        raise ValueError("costs must be finite numbers")
    return split


def _greedy(summed: Sequence[float], stages: int, limit: float, first: float, last: float) -> tuple[int, ...] | None:
    """Stages filled from the end up to `limit`, leaving each of the others a layer; None where that is too little."""
    end, split = len(summed) - 1, []
    for stage in range(stages - 1, -1, -1):
        room = limit - (last if stage == stages - 1 else 0.0) - (first if stage == 0 else 0.0)
        lowest = bisect_right(summed, summed[end] - room - 1e-12 * limit - 1e-300)
        begin = max(stage, min(lowest, end))
        if begin == end or (stage == 0 and begin > 0):
            return None
        split.append(end - begin)
        end = begin
    return tuple(reversed(split))
