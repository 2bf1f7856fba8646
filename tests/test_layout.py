"""Ranks and coordinates: one bijection, and groups that cut the world into equal parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.layout import Coordinates, Layout, split_layers

degrees = st.integers(1, 6)
layouts = st.builds(Layout, tensor=degrees, pipeline=degrees, data=degrees, context=degrees)


def test_tensor_is_innermost_and_data_outermost() -> None:
    layout = Layout(tensor=2, pipeline=2, data=2)
    assert [layout.coordinates(rank) for rank in range(8)] == [
        Coordinates(data, pipeline, 0, tensor) for data in range(2) for pipeline in range(2) for tensor in range(2)
    ]
    assert layout.tensor_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.pipeline_groups() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.data_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]


@given(layouts)
def test_rank_and_coordinates_are_inverse(layout: Layout) -> None:
    assert [layout.rank(*layout.coordinates(rank)) for rank in range(layout.world_size)] == list(
        range(layout.world_size)
    )


@given(layouts)
def test_each_kind_of_group_covers_every_rank_once(layout: Layout) -> None:
    for groups, size in (
        (layout.tensor_groups(), layout.tensor),
        (layout.pipeline_groups(), layout.pipeline),
        (layout.context_groups(), layout.context),
        (layout.data_groups(), layout.data),
        (layout.shard_groups(), layout.shard_ranks),
    ):
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
        assert {len(group) for group in groups} == {size}


@given(layouts)
def test_groups_differ_only_in_their_own_coordinate(layout: Layout) -> None:
    dimensions = (layout.data_groups(), layout.pipeline_groups(), layout.context_groups(), layout.tensor_groups())
    for own, groups in enumerate(dimensions):
        for group in groups:
            others = {tuple(v for i, v in enumerate(layout.coordinates(r)) if i != own) for r in group}
            assert len(others) == 1
            assert [layout.coordinates(r)[own] for r in group] == list(range(len(group)))


@given(layouts, st.integers(1, 12))
def test_workers_are_consecutive_and_complete_or_rejected(layout: Layout, size: int) -> None:
    if layout.world_size % size:
        with pytest.raises(ValueError, match="does not divide"):
            layout.workers(size)
    else:
        workers = layout.workers(size)
        assert [rank for worker in workers for rank in worker] == list(range(layout.world_size))
        assert {len(worker) for worker in workers} == {size}


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_outside_the_world_is_rejected(rank: int) -> None:
    with pytest.raises(ValueError, match="outside a world of 8"):
        Layout(2, 2, 2).coordinates(rank)


def test_numbers_by_stage_are_those_of_a_mesh_with_the_stages_first() -> None:
    layout = Layout(tensor=2, pipeline=3, data=2, context=2)
    numbers = [layout.rank_by_stage(rank) for rank in range(layout.world_size)]
    order = [(p, d, c, t) for p in range(3) for d in range(2) for c in range(2) for t in range(2)]
    for rank, number in enumerate(numbers):
        data, pipeline, context, tensor = layout.coordinates(rank)
        assert order[number] == (pipeline, data, context, tensor)
    assert (numbers[0], numbers[-1]) == (0, layout.world_size - 1)


@pytest.mark.parametrize("name", ["tensor", "pipeline", "data"])
def test_a_degree_below_one_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be at least 1"):
        Layout(**{name: 0})


@given(st.integers(1, 200), st.integers(1, 40))
def test_every_layer_has_exactly_one_stage(layers: int, stages: int) -> None:
    if stages > layers:
        with pytest.raises(ValueError, match="each stage needs at least one"):
            split_layers(layers, stages)
        return
    split = split_layers(layers, stages)
    assert [layer for stage in split for layer in stage] == list(range(layers))
    sizes = [len(stage) for stage in split]
    assert len(sizes) == stages
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_experts_are_on_neighbors_of_a_shard_group_and_ranks_with_the_same_ones_on_the_rest() -> None:
    layout = Layout(tensor=2, pipeline=2, data=2, context=2, expert=2)
    assert layout.shard_groups() == [[0, 2, 8, 10], [1, 3, 9, 11], [4, 6, 12, 14], [5, 7, 13, 15]]
    assert layout.expert_groups()[:2] == [[0, 2], [8, 10]], "ranks of one replica, which are closest, exchange tokens"
    assert layout.expert_shard_groups()[:2] == [[0, 8], [2, 10]]


@pytest.mark.parametrize("expert", [1, 2, 3, 4, 6, 12])
def test_every_rank_has_one_expert_group_and_one_shard_of_it(expert: int) -> None:
    layout = Layout(tensor=2, pipeline=2, data=3, context=4, expert=expert)
    groups, shards = layout.expert_groups(), layout.expert_shard_groups()
    for found in (groups, shards):
        assert sorted(rank for group in found for rank in group) == list(range(layout.world_size))
    assert {len(group) for group in groups} == {expert}
    index = {rank: group.index(rank) for group in groups for rank in group}
    assert all(len({index[rank] for rank in shard}) == 1 for shard in shards), "a shard has the same experts"
    assert len(shards) == 2 * 2 * expert
