"""Layers by cost: no split has a faster slowest stage, and where ranks hold several none of those a faster rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.api.mixture import MixtureSpec
from meshwright.api.parallelism import ParallelismSpec, PipelineSchedule, StageBalance
from meshwright.models.architecture import Architecture
from meshwright.models.presets import PRESETS
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.workload import layer_split
from meshwright.schedules.flop_costs import stage_costs
from meshwright.schedules.multi_stage_partition import partition_over_ranks
from meshwright.schedules.partition import partition_layers
from meshwright.schedules.pipeline_layout import layers_of_stages, pipeline_layout, stage_ranks, stages_per_rank
from meshwright.schedules.simulator import simulate


def half_dense(layers: int, dense: int) -> Architecture:
    """The first layers dense, the others mixtures of twice the work."""
    mixture = MixtureSpec(experts=8, per_token=4, intermediate_size=128, dense_layers=dense)
    return Architecture(
        layers=layers, hidden_size=64, intermediate_size=128, heads=4, kv_heads=4, vocab_size=512, mixture=mixture
    )


HALF_DENSE = half_dense(16, 8)
LENGTH = 64


def every_split(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, layers), stages - 1):
        bounds = (0, *cuts, layers)
        yield tuple(end - begin for begin, end in zip(bounds, bounds[1:], strict=False))


def of_ranks(
    costs: Sequence[float], split: Sequence[int], homes: Sequence[int], first: float = 0.0, last: float = 0.0
) -> list[float]:
    ranks, at = [0.0] * (max(homes) + 1), 0
    for home, layers in zip(homes, split, strict=True):
        ranks[home] += sum(costs[at : at + layers])
        at += layers
    ranks[homes[0]] += first
    ranks[homes[-1]] += last
    return ranks


@given(
    st.lists(st.floats(0.0, 10.0), min_size=1, max_size=9),
    st.integers(1, 9),
    st.floats(0.0, 5.0),
    st.floats(0.0, 5.0),
)
def test_no_split_has_a_faster_slowest_stage(costs: list[float], stages: int, first: float, last: float) -> None:
    if stages > len(costs):
        with pytest.raises(ValueError, match="cannot be split"):
            partition_layers(costs, stages, first, last)
        return
    split, homes = partition_layers(costs, stages, first, last), range(stages)
    assert (sum(split), len(split)) == (len(costs), stages)
    assert min(split) >= 1
    best = min(max(of_ranks(costs, one, homes, first, last)) for one in every_split(len(costs), stages))
    assert max(of_ranks(costs, split, homes, first, last)) <= best + 1e-6
    assert partition_over_ranks(costs, homes, first, last) == split


def test_equal_layers_are_dealt_evenly() -> None:
    assert sorted(partition_layers([1.0] * 17, 4)) == [4, 4, 4, 5]
    assert partition_layers([1.0] * 16, 4, last=2.0) == (4, 5, 4, 3)
    assert partition_layers([0.0] * 5, 5) == (1,) * 5


HOMES = {
    "interleaved": [0, 1, 2, 0, 1, 2],
    "interleaved, 3 a rank": [0, 1, 0, 1, 0, 1],
    "folded": [0, 1, 2, 3, 3, 2, 1, 0],
    "folded, 2 ranks": [0, 1, 1, 0],
}


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(HOMES)),
    st.lists(st.sampled_from([1.0, 1.5, 2.0, 3.0, 2.71]), min_size=8, max_size=11),
    st.sampled_from([0.0, 0.7]),
    st.sampled_from([0.0, 2.5, 9.0]),
)
def test_of_the_splits_with_the_fastest_slowest_stage_none_has_a_faster_rank(
    name: str, costs: list[float], first: float, last: float
) -> None:
    homes = HOMES[name]
    split = partition_over_ranks(costs, homes, first, last)
    assert (sum(split), len(split), min(split) >= 1) == (len(costs), len(homes), True)

    def slowest(split: Sequence[int]) -> tuple[float, float]:
        stages, ranks = (max(of_ranks(costs, split, each, first, last)) for each in (range(len(homes)), homes))
        return round(stages, 6), round(ranks, 6)

    assert slowest(split) == min(slowest(one) for one in every_split(len(costs), len(homes)))


SCHEDULED = [*PipelineSchedule]


def asked(schedule: PipelineSchedule, **fields: Any) -> ParallelismSpec:
    return ParallelismSpec(schedule=schedule, stage_balance=StageBalance.FLOPS, **fields)


@pytest.mark.parametrize("schedule", SCHEDULED)
def test_layers_weigh_what_their_stages_cost(schedule: PipelineSchedule) -> None:
    """By `stage_costs`: no other split has a faster slowest stage, and none of those a faster slowest rank."""
    model, ranks = half_dense(10, 5), 2
    parallelism = asked(schedule)
    homes = stage_ranks(parallelism, ranks)

    def slowest(layers: list[range]) -> tuple[float, float]:
        costs = [one.total for one in stage_costs(model, LENGTH, layers)]
        each = [sum(cost for cost, home in zip(costs, homes, strict=True) if home == rank) for rank in set(homes)]
        return max(costs), max(each)

    best = min(slowest(ranges(split)) for split in every_split(model.layers, len(homes)))
    assert slowest(layers_of_stages(parallelism, ranks, model, LENGTH)) == best


def ranges(split: Sequence[int]) -> list[range]:
    bounds = [sum(split[:stage]) for stage in range(len(split) + 1)]
    return [range(begin, end) for begin, end in zip(bounds, bounds[1:], strict=False)]


def test_mixtures_weigh_more_than_dense_layers() -> None:
    layers = layers_of_stages(asked(PipelineSchedule.ONE_F_ONE_B), 4, HALF_DENSE, LENGTH)
    costs = [one.total for one in stage_costs(HALF_DENSE, LENGTH, layers)]
    even = [one.total for one in stage_costs(HALF_DENSE, LENGTH, ranges([4] * 4))]
    assert len(layers[0]) > len(layers[-1])
    assert max(costs) < 1.1 * fmean(costs)
    assert max(even) > 1.3 * fmean(even)


@pytest.mark.parametrize(
    "schedule", [s for s in SCHEDULED if stages_per_rank(asked(s), 4) == 2 or s is PipelineSchedule.DUAL_PIPE]
)
def test_pipelines_with_two_stages_a_rank_end_sooner(schedule: PipelineSchedule) -> None:
    """What the ranks are balanced for: steps, simulated with the stages' costs."""

    def ends(balance: StageBalance, dense: int) -> float:
        model = half_dense(16, dense)
        pipeline = pipeline_layout(ParallelismSpec(schedule=schedule, stage_balance=balance), 4, 16, model, LENGTH)
        return simulate(pipeline.schedule, stage_costs(model, LENGTH, pipeline.layers)).makespan

    of_equal_layers, of_equal_work = (
        sum(ends(balance, dense) for dense in range(2, 12, 3)) for balance in (StageBalance.LAYERS, StageBalance.FLOPS)
    )
    assert of_equal_work < 0.97 * of_equal_layers


@pytest.mark.parametrize("schedule", SCHEDULED)
@pytest.mark.parametrize("balance", list(StageBalance))
@pytest.mark.parametrize("name", ["half", "deepseek-v2-lite"])
def test_the_planner_counts_the_layers_that_ranks_hold(
    schedule: PipelineSchedule, balance: StageBalance, name: str
) -> None:
    model = HALF_DENSE if name == "half" else PRESETS[name]
    parallelism = ParallelismSpec(schedule=schedule, stage_balance=balance)
    ranks = 4
    pipeline = pipeline_layout(parallelism, ranks, 1 if schedule is PipelineSchedule.PIPEDREAM else 16, model, LENGTH)
    strategy = Strategy(
        pipeline=ranks,
        schedule=schedule,
        virtual_stages=stages_per_rank(parallelism, ranks),
        layer_split=layer_split(parallelism, ranks, model, LENGTH),
    )
    for rank, own in enumerate(strategy.layers_of(model.layers)):
        held = pipeline.stages(rank)
        if schedule is PipelineSchedule.DUAL_PIPE:
            # Two ranks hold each stage: the planner counts the one that a rank has in the pipeline's order, twice.
            held = [rank]
        assert list(own) == [pipeline.layers[stage] for stage in held]


@settings(max_examples=20)
@given(st.integers(2, 40), st.integers(1, 8), st.integers(1, 3))
def test_large_pipelines_are_dealt_too(extra: int, ranks: int, chunks: int) -> None:
    homes = [stage % ranks for stage in range(ranks * chunks)]
    split = partition_over_ranks([1.0 + (layer % 3) for layer in range(len(homes) + extra)], homes, last=3.0)
    assert (sum(split), len(split)) == (len(homes) + extra, len(homes))
    assert min(split) >= 1
