"""Layers dealt by measured times: the best split for one stage per rank, and never a slower one."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.api.parallelism import ParallelismSpec, PipelineSchedule, StageBalance
from meshwright.models.architecture import Architecture
from meshwright.schedules.flop_costs import layer_costs, output_costs
from meshwright.schedules.measured_balance import measured_split, rank_loads
from meshwright.schedules.pipeline_layout import layers_of_stages, stage_ranks

LENGTH = 64


def model(layers: int) -> Architecture:
    return Architecture(layers=layers, hidden_size=64, intermediate_size=128, heads=4, kv_heads=2, vocab_size=512)


def spec(split: list[int] | None = None, schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B) -> ParallelismSpec:
    return ParallelismSpec(stage_balance=StageBalance.MEASURED, schedule=schedule, layer_split=split)


def slowest(split: list[int], homes: list[int], layers: int, speeds: list[float]) -> float:
    costs = [layer_costs(model(layers), LENGTH, layer).total for layer in range(layers)]
    return max(rank_loads(split, homes, costs, output_costs(model(layers)).total, speeds))


def times_at(parallelism: ParallelismSpec, ranks: int, layers: int, speeds: list[float]) -> dict[int, float]:
    """What ranks of these speeds measure."""
    homes = stage_ranks(parallelism, ranks)
    present = [len(stage) for stage in layers_of_stages(parallelism, ranks, model(layers), LENGTH)]
    costs = [layer_costs(model(layers), LENGTH, layer).total for layer in range(layers)]
    return dict(enumerate(rank_loads(present, homes, costs, output_costs(model(layers)).total, speeds)))


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.integers(4, 10), st.data())
def test_it_is_the_best_of_all_splits(ranks: int, layers: int, data: st.DataObject) -> None:
    speeds = data.draw(st.lists(st.floats(0.5, 4.0), min_size=ranks, max_size=ranks))
    found = measured_split(spec(), ranks, model(layers), LENGTH, times_at(spec(), ranks, layers, speeds))
    every = [
        [end - begin for begin, end in pairwise((0, *bounds, layers))]
        for bounds in combinations(range(1, layers), ranks - 1)
    ]
    homes = list(range(ranks))
    best = min(slowest(split, homes, layers, speeds) for split in every)
    assert sum(found) == layers
    assert slowest(found, homes, layers, speeds) <= best / 0.97 + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([PipelineSchedule.INTERLEAVED, PipelineSchedule.ZB_V]), st.data())
def test_several_stages_of_a_rank_are_never_slower(schedule: PipelineSchedule, data: st.DataObject) -> None:
    ranks, layers = data.draw(st.integers(2, 4)), data.draw(st.integers(8, 16))
    speeds = data.draw(st.lists(st.floats(0.5, 4.0), min_size=ranks, max_size=ranks))
    parallelism = spec(schedule=schedule)
    present = [len(stage) for stage in layers_of_stages(parallelism, ranks, model(layers), LENGTH)]
    found = measured_split(parallelism, ranks, model(layers), LENGTH, times_at(parallelism, ranks, layers, speeds))
    homes = stage_ranks(parallelism, ranks)
    assert sum(found) == layers
    assert min(found) >= 1
    assert slowest(found, homes, layers, speeds) <= slowest(present, homes, layers, speeds)


def test_a_slow_rank_gets_fewer_layers() -> None:
    times = times_at(spec([4, 4, 4]), 3, 12, [1.0, 3.0, 1.0])
    split = measured_split(spec([4, 4, 4]), 3, model(12), LENGTH, times)
    assert split[1] < 4
    assert sum(split) == 12


def test_a_small_gain_changes_nothing() -> None:
    parallelism = spec([4, 4])
    assert measured_split(parallelism, 2, model(8), LENGTH, {0: 1.0, 1: 1.02}) == [4, 4]


def test_a_rank_without_a_time_is_an_error() -> None:
    with pytest.raises(KeyError):
        measured_split(spec([4, 4]), 2, model(8), LENGTH, {0: 1.0})
