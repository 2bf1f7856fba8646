"""Layers of the stages of a pipeline, dealt again by the times that its ranks have measured.

Counted operations say how layers compare on one device. Devices differ, and so do kernels at different sizes: a rank's
measured time over its counted operations is the cost of one operation there. The layers are dealt so that the slowest
rank takes the least time: with one stage per rank exactly, by dynamic programming, with several as far as moves of one
layer to a neighboring stage lead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import inf

from meshwright.api.parallelism import ParallelismSpec
from meshwright.models.architecture import Architecture
from meshwright.schedules.flop_costs import layer_costs, output_costs
from meshwright.schedules.pipeline_layout import layers_of_stages, stage_ranks

LEAST_GAIN = 0.03
"""Part of the slowest rank's time that another split must save: smaller differences are those of two measurements."""


def measured_split(
    parallelism: ParallelismSpec, ranks: int, model: Architecture, length: int, seconds: Mapping[int, float]
) -> list[int]:
    """Return the number of layers of each stage, in the model's order. The present split if another one gains little.

    Args:
        parallelism: that of the run which was measured, with its `layerSplit`.
        ranks: pipeline ranks.
        model: the model.
        length: tokens of a sequence.
        seconds: pipeline rank -> time of its passes in a step, without waits.

    Raises:
        KeyError: a rank has no time.
    """
    homes = stage_ranks(parallelism, ranks)
    present = [len(layers) for layers in layers_of_stages(parallelism, ranks, model, length)]
    costs = [
        layer_costs(model, length, layer, recomputes=parallelism.rematerialize).total for layer in range(model.layers)
    ]
    output = output_costs(model, recomputes=parallelism.rematerialize).total
    counted = rank_loads(present, homes, costs, output, [1.0] * ranks)
    speeds = [seconds[rank] / counted[rank] for rank in range(ranks)]
    dealt = _least_slowest_stage(costs, [speeds[home] for home in homes], output)
    split = min(
        (_improved(start, homes, costs, output, speeds) for start in (dealt, present)),
        key=lambda one: max(rank_loads(one, homes, costs, output, speeds)),
    )
    now, then = (max(rank_loads(one, homes, costs, output, speeds)) for one in (present, split))
    return split if then < (1.0 - LEAST_GAIN) * now else present


def rank_loads(
    split: Sequence[int], homes: Sequence[int], costs: Sequence[float], output: float, speeds: Sequence[float]
) -> list[float]:
    """Return the time of each rank: of its stages' layers, and on the last stage of the output projection.

    Args:
        split: layers of each stage.
        homes: the rank of each stage.
        costs: operations of each layer.
        output: operations of the output projection.
        speeds: seconds of one operation on each rank.
    """
    loads, first = [0.0] * (max(homes) + 1), 0
    for stage, layers in enumerate(split):
        operations = sum(costs[first : first + layers]) + (output if stage == len(split) - 1 else 0.0)
        loads[homes[stage]] += operations * speeds[homes[stage]]
        first += layers
    return loads


def _least_slowest_stage(costs: Sequence[float], speeds: Sequence[float], output: float) -> list[int]:
    """Layers of each stage, of which the slowest takes the least time. `speeds` are those of the stages' ranks."""
    layers, stages = len(costs), len(speeds)
    sums = [0.0, *accumulate(costs)]
    least = [0.0] + [inf] * layers
    begins: list[list[int]] = []
    for stage, speed in enumerate(speeds):
        extra = output if stage == stages - 1 else 0.0
        following, chosen = [inf] * (layers + 1), [0] * (layers + 1)
        for end in range(stage + 1, layers - (stages - 1 - stage) + 1):
            for begin in range(stage, end):
                slowest = max(least[begin], (sums[end] - sums[begin] + extra) * speed)
                if slowest < following[end]:
                    following[end], chosen[end] = slowest, begin
        least = following
        begins.append(chosen)
    bounds = [layers]
    for chosen in reversed(begins):
        bounds.append(chosen[bounds[-1]])
    return [end - begin for begin, end in pairwise(reversed(bounds))]


def _improved(
    start: Sequence[int], homes: Sequence[int], costs: Sequence[float], output: float, speeds: Sequence[float]
) -> list[int]:
    """Move layers between neighboring stages as long as the slowest ranks become faster."""

    def loads(split: Sequence[int]) -> list[float]:
        return sorted(rank_loads(split, homes, costs, output, speeds), reverse=True)

    split = list(start)
    while True:
        moved = [
            [*split[:stage], split[stage] - move, split[stage + 1] + move, *split[stage + 2 :]]
            for stage in range(len(split) - 1)
            for move in (-1, 1)
            if split[stage] > move and split[stage + 1] > -move
        ]
        best = min(moved, key=loads, default=split)
        if loads(best) >= loads(split):
            return split
        split = best
