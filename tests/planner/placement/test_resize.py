"""The ranks of the workers that go on after a resize."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.placement.capacity import GangShape
from meshwright.planner.placement.resize import workers_on_resize
from meshwright.planner.plan import Plan
from tests.planner.builders import plan_of


def plan(data: int, tensor: int = 2, pipeline: int = 2, gpus: int = 2) -> Plan:
    return plan_of(tensor=tensor, pipeline=pipeline, data=data, gpus_per_worker=gpus)


def test_shrinking_keeps_the_ranks_of_replicas_that_stay() -> None:
    assert workers_on_resize(plan(4), plan(2), {w: w for w in range(8)}) == {0: 0, 1: 1, 2: 2, 3: 3}


def test_growing_keeps_all_ranks() -> None:
    assert workers_on_resize(plan(2), plan(4), {5: 0, 1: 1, 7: 2, 3: 3}) == {5: 0, 1: 1, 7: 2, 3: 3}


def test_a_complete_replica_takes_the_place_of_a_broken_one() -> None:
    running = {w: w for w in range(4) if w != 1}
    assert workers_on_resize(plan(2), plan(1), running) == {2: 0, 3: 1}


def test_two_broken_replicas_form_a_complete_one_at_the_same_stages() -> None:
    running = {w: w for w in range(4) if w not in (0, 3)}
    assert workers_on_resize(plan(2), plan(1), running) == {1: 1, 2: 0}


def test_a_stage_is_left_only_if_no_worker_of_it_is_there() -> None:
    running = {0: 0, 2: 2}
    assert workers_on_resize(plan(2), plan(1), running) == {0: 0, 2: 1}


def test_a_tensor_parallel_group_of_two_workers_moves_as_a_whole() -> None:
    old, new = plan(2, tensor=4, pipeline=1), plan(1, tensor=4, pipeline=1)
    assert workers_on_resize(old, new, {1: 1, 2: 2, 3: 3}) == {2: 0, 3: 1}
    assert workers_on_resize(old, new, {1: 1, 2: 2}) == {}


def test_other_degrees_number_the_workers_in_order() -> None:
    assert workers_on_resize(plan(1), plan(1, pipeline=1), {4: 1, 9: 0}) == {9: 0}


@given(st.data(), st.integers(1, 6), st.integers(1, 6), st.sampled_from([(2, 2, 2), (4, 1, 2), (2, 3, 2), (1, 1, 2)]))
def test_every_assignment_is_one_to_one_and_keeps_as_much_as_possible(
    data: st.DataObject, before: int, after: int, degrees: tuple[int, int, int]
) -> None:
    tensor, pipeline, gpus = degrees
    if tensor == 1:
        before, after = 2 * before, 2 * after
    old, new = (plan(n, tensor, pipeline, gpus) for n in (before, after))
    shape, target = GangShape(old), GangShape(new)
    alive = data.draw(st.sets(st.sampled_from(range(shape.workers))))
    running = {100 + worker: worker for worker in alive}
    found = workers_on_resize(old, new, running)
    assert len(set(found.values())) == len(found)
    assert set(found) <= set(running)
    assert set(found.values()) <= set(range(target.workers))
    whole = sum(all(w in alive for w in shape.workers_of(block)) for block in range(shape.blocks))
    assert len(found) == min(whole, target.blocks) * shape.block_workers
    stays = min(shape.segments, target.segments)
    workers = shape.segment_blocks * shape.block_workers
    for segment in range(stays):
        members = range(segment * workers, (segment + 1) * workers)
        if all(worker in alive for worker in members):
            assert all(found[100 + worker] == worker for worker in members)
