"""Who has the same state, and from which step all ranks go on."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.memory_recovery import (
    describe,
    format_ranks,
    keeping_ranks,
    plan_recovery,
    state_of,
    transfers,
    unsupported,
)
from meshwright.protocol.messages import HeldState, MemoryRecovery
from tests.distributed.configs import small_run
from tests.runs import command_run


def held(step: int, reduced: int | None = None) -> HeldState:
    return HeldState(step=step, reduced=reduced)


@pytest.mark.parametrize(
    ("options", "same_as_0"),
    [
        ({"data": 4}, [0, 1, 2, 3]),
        ({"data": 2, "tensor": 2}, [0, 2]),
        ({"data": 2, "pipeline": 2}, [0, 2]),
        ({"data": 2, "context": 2}, [0, 1, 2, 3]),
        ({"data": 4, "zero": 3}, [0]),
        ({"data": 4, "zero": 1}, [0]),
        ({"data": 4, "zero": 3, "replicas": {"shard_size": 2}}, [0, 2]),
        ({"data": 4, "zero": 1, "replicas": {"shard_size": 2}}, [0, 2]),
        ({"data": 4, "expert": 2, "mixture": "Switch"}, [0, 2]),
        ({"data": 4, "expert": 2, "mixture": "Switch", "zero": 3}, [0]),
    ],
)
def test_ranks_with_the_same_state(options: dict[str, Any], same_as_0: list[int]) -> None:
    run = small_run(**options)
    names = [state_of(run, rank) for rank in range(run.layout.world_size)]
    assert [rank for rank, name in enumerate(names) if name == names[0]] == same_as_0
    assert bool(unsupported(run)) == (same_as_0 == [0])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"outer": {"method": "DiLoCo", "every_steps": 4}}, "training.outer"),
        ({"replicas": {"compression": "PowerSGD"}}, "compression"),
        ({"optimizer": {"name": "Muon"}}, "Muon"),
        ({"training": {"parameter_offload": True}, "zero": 3, "replicas": {"shard_size": 1}}, "parameterOffload"),
    ],
)
def test_techniques_with_more_state_are_named(options: dict[str, Any], named: str) -> None:
    assert named in unsupported(small_run(data=2, **options))


def test_a_command_has_its_own_state() -> None:
    assert "runtime.command" in unsupported(command_run(["train"]))


def test_all_go_on_from_the_newest_step_and_a_rank_behind_makes_the_update() -> None:
    run = small_run(data=4)
    memory = plan_recovery(run, 3, {0: held(6, 7), 1: held(7), 2: held(6, 7)})
    assert memory == MemoryRecovery(generation=3, step=7, leader=1, ranks="0-2")
    assert transfers(run, memory) == {3: 0}
    assert describe(run, memory) == (
        "3 of 4 ranks continue from step 7, which they have in memory; rank 3 gets the state of rank 0"
    )


def test_a_rank_that_is_too_far_behind_gets_the_state_of_another() -> None:
    run = small_run(data=4)
    memory = plan_recovery(run, 3, {0: held(6), 1: held(7), 2: held(7)})
    assert isinstance(memory, MemoryRecovery)
    assert (memory.ranks, transfers(run, memory)) == ("1-2", {0: 1, 3: 1})


def test_a_state_that_nobody_has_left_is_named() -> None:
    run = small_run(data=2, tensor=2)
    assert plan_recovery(run, 3, {0: held(7), 2: held(7)}) == "no rank is left that has the state of ranks 1, 3"
    assert plan_recovery(run, 3, {}) == "no rank has kept its state"


@pytest.mark.parametrize("ranks", [[], [0], [0, 1, 2], [5, 7, 8, 9, 3000]])
def test_ranges_are_read_as_they_are_written(ranks: list[int]) -> None:
    memory = MemoryRecovery(generation=1, step=1, leader=0, ranks=format_ranks(ranks))
    assert keeping_ranks(memory) == frozenset(ranks)
