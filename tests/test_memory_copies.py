"""Copies of state in a peer's host memory: where they go, which losses they survive, and how all go back to them."""

from __future__ import annotations

import pytest

from meshwright.memory_copies import (
    RankPlace,
    choose_shift,
    describe_survived,
    find_copies,
    format_holders,
    parse_holders,
)
from meshwright.memory_recovery import describe, plan_recovery, transfers, unsupported
from meshwright.protocol.messages import HeldCopy, HeldState, MemoryRecovery
from tests.distributed.configs import small_run

SHARDED = small_run(data=4, zero=3)


def places(racks: str, *, per_worker: int = 2) -> list[RankPlace]:
    """The ranks of workers on a node each, in these racks."""
    return [
        RankPlace(worker, f"node-{worker}", "", f"rack-{rack}")
        for worker, rack in enumerate(racks)
        for _ in range(per_worker)
    ]


def held(rank: int, peer: int, step: int, *copies: int, of_peer: tuple[int, ...] | None = None) -> HeldState:
    """What a rank holds that has copies of its own of these steps, and of a peer, by default of the same ones."""
    found = [HeldCopy(rank=rank, step=at) for at in copies]
    found += [HeldCopy(rank=peer, step=at) for at in (copies if of_peer is None else of_peer)]
    return HeldState(step=step, copies=found)


@pytest.mark.parametrize(
    ("racks", "shift", "survived"),
    [
        ("aabb", 4, "the loss of any rank, worker, node or rack"),
        ("abab", 2, "the loss of any rank, worker, node or rack"),
        ("aab", 2, "the loss of any rank, worker or node"),
        ("aaaa", 2, "the loss of any rank, worker or node"),
        ("a", 1, "the loss of any rank"),
    ],
)
def test_copies_are_on_another_worker_and_rack_where_there_is_one(racks: str, shift: int, survived: str) -> None:
    assert choose_shift(places(racks)) == shift
    assert describe_survived(places(racks), shift) == survived


def test_a_single_rank_has_no_peer() -> None:
    assert choose_shift([RankPlace(0)]) == 0
    assert describe_survived([RankPlace(0)], 0) == "no loss"


def test_all_go_back_to_the_newest_step_of_which_every_state_is_left() -> None:
    # Rank 3 is lost. Rank 1 has its copy, and has not received that of step 8 completely.
    states = {
        0: held(0, 2, 9, 4, 8),
        1: held(1, 3, 9, 4, 8, of_peer=(4,)),
        2: held(2, 0, 8, 4, 8),
    }
    assert find_copies(4, states) == (4, {3: 1})
    memory = plan_recovery(SHARDED, 5, states)
    assert isinstance(memory, MemoryRecovery)
    assert (memory.generation, memory.step, memory.leader, memory.ranks, memory.holders) == (5, 4, 0, "0-2", "3:1")
    assert transfers(SHARDED, memory) == {3: 1}
    assert describe(SHARDED, memory) == (
        "All ranks go back to step 4, of which they have copies in host memory; rank 3 gets the state of rank 1"
    )


def test_of_two_complete_steps_the_newer_one_is_taken() -> None:
    states = {rank: held(rank, (rank + 2) % 4, 9, 4, 8) for rank in range(3)}
    assert find_copies(4, states) == (8, {3: 1})


def test_a_place_that_is_not_known_counts_as_the_same_one() -> None:
    unknown = [RankPlace(worker, node) for worker, node in enumerate(("node-0", "", "node-2", "node-3"))]
    assert describe_survived(unknown, 1) == "the loss of any rank or worker"


def test_a_rank_without_its_own_copy_gets_that_of_its_peer() -> None:
    states = {0: held(0, 2, 8, 8, of_peer=()), 1: held(1, 3, 8, 8), 2: held(2, 0, 8, of_peer=(8,)), 3: held(3, 1, 8, 8)}
    assert find_copies(4, states) is None, "rank 0 holds the copies of rank 2"
    states[0] = HeldState(step=8, copies=[HeldCopy(rank=0, step=8), HeldCopy(rank=2, step=8)])
    assert find_copies(4, states) == (8, {2: 0})


def test_if_a_rank_and_its_peer_are_lost_storage_is_needed() -> None:
    states = {0: held(0, 2, 9, 8), 2: held(2, 0, 9, 8)}
    assert plan_recovery(SHARDED, 5, states) == "no rank is left that has the state of ranks 1, 3"


def test_the_same_state_of_another_rank_is_newer_than_copies() -> None:
    run = small_run(data=4)
    memory = plan_recovery(run, 5, {rank: held(rank, (rank + 2) % 4, 9, 8) for rank in range(3)})
    assert isinstance(memory, MemoryRecovery)
    assert (memory.step, memory.holders) == (9, None)


def test_state_that_no_other_rank_has_needs_copies() -> None:
    assert "`recovery.copyEverySteps`" in unsupported(SHARDED)
    assert unsupported(SHARDED, copies=True) == ""
    assert "no other rank" in unsupported(small_run(), copies=True)


def test_holders_are_written_and_read() -> None:
    assert parse_holders(format_holders({3: 1, 10: 4})) == {3: 1, 10: 4}
    assert parse_holders("") == {}
    assert parse_holders("x:1,3:,4:2") == {4: 2}
