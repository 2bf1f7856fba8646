"""What an agent decides when ranks recover in memory: they leave their generation, hold their state, and go on."""

from __future__ import annotations

import pytest

from meshwright.protocol.messages import AgentState, FailureKind, HeldState, MemoryRecovery, MeshDocument
from meshwright_worker.agent.state_machine import (
    LEAVE_SECONDS,
    KillRanks,
    LeaveRanks,
    StartRanks,
    TerminateRanks,
    build_report,
)
from meshwright_worker.rank.messages import Held, RankFailed, Running
from tests.agent.test_state_machine import PEER_LOST, Driver, document, step

KILLED = -9


def in_memory(generation: int, memory: MemoryRecovery | None = None) -> MeshDocument:
    return document(generation).model_copy(update={"in_memory": True, "memory": memory})


def recovery(generation: int, ranks: str) -> MemoryRecovery:
    return MemoryRecovery(generation=generation, step=1, leader=0, ranks=ranks)


@pytest.fixture
def training() -> Driver:
    """Both ranks of generation 1 have finished a step, and can hold their state."""
    driver = Driver()
    driver.start(in_memory(1))
    for rank in (0, 1):
        driver.tell(rank, Running(0), step(1))
    return driver


def test_a_rank_is_lost_and_the_other_goes_on_with_its_process(training: Driver) -> None:
    state_machine = training.state_machine
    assert training.exit(1, KILLED) == [LeaveRanks(1, (0,))]
    assert state_machine.state is AgentState.STARTING, "it has not left yet"
    assert training.tell(0, Held(1, 2, 0.002)) == []
    report = build_report(state_machine)
    assert (report.state, report.failure) == (AgentState.FAILED, FailureKind.ERROR)
    assert [rank.held for rank in report.ranks] == [HeldState(step=1, reduced=2), None]
    assert state_machine.deadline is None
    (start,) = state_machine.on_mesh(in_memory(2, recovery(1, "0")), training.now)
    assert isinstance(start, StartRanks)
    assert start.resumed == (0,)
    assert state_machine.state is AgentState.STARTING


def test_lost_peers_let_ranks_leave_at_once(training: Driver) -> None:
    assert training.tell(0, PEER_LOST) == [LeaveRanks(1, (0, 1))]
    training.tell(0, Held(1, None, 0.001))
    training.tell(1, Held(1, None, 0.001))
    report = build_report(training.state_machine)
    assert (report.state, report.failure) == (AgentState.FAILED, FailureKind.PEER_LOST)


def test_the_coordinator_tells_of_losses_that_no_rank_notices(training: Driver) -> None:
    state_machine = training.state_machine
    assert state_machine.on_leave(7, training.now) == []
    assert state_machine.on_leave(1, training.now) == [LeaveRanks(1, (0, 1))]
    assert state_machine.on_leave(1, training.now) == []
    for rank in (0, 1):
        training.tell(rank, Held(1, None, 0.001))
    assert build_report(state_machine).state is AgentState.IDLE


def test_a_rank_that_does_not_leave_is_killed_and_another_starts(training: Driver) -> None:
    state_machine = training.state_machine
    state_machine.on_leave(1, training.now)
    training.tell(0, Held(1, None, 0.001))
    assert state_machine.deadline == training.now + LEAVE_SECONDS
    assert training.after(LEAVE_SECONDS) == [KillRanks((1,))]
    assert training.after(1.0) == []
    training.exit(1, KILLED)
    (start,) = state_machine.on_mesh(in_memory(2, recovery(1, "0")), training.now)
    assert isinstance(start, StartRanks)
    assert start.resumed == (0,)


def test_ranks_go_on_as_those_of_a_lost_worker() -> None:
    """Replicas continue without worker 0: the processes of worker 1 become ranks 0 and 1, and later 2 and 3 again."""
    driver = Driver(worker=1)
    driver.start(document(1, workers=2).model_copy(update={"in_memory": True}))
    for rank in (2, 3):
        driver.tell(rank, Running(0), step(1))
    driver.state_machine.on_leave(1, driver.now)
    for rank in (2, 3):
        driver.tell(rank, Held(1, None, 0.001))
    smaller = document(2, workers=2)
    member = smaller.members[1].model_copy(update={"first_rank": 0})
    smaller = smaller.model_copy(
        update={"in_memory": True, "memory": recovery(1, "0-1"), "members": [member], "world_size": 2}
    )
    (start,) = driver.state_machine.on_mesh(smaller, driver.now)
    assert isinstance(start, StartRanks)
    assert (start.resumed, start.shift) == ((0, 1), -2)
    for rank in (0, 1):
        driver.state_machine.on_spawned(2, rank, 100 + rank, driver.now)
        driver.tell(rank, Running(1), step(2), generation=2)
    driver.exit(1, KILLED, generation=2)
    driver.tell(0, Held(2, None, 0.001), generation=2)
    larger = document(3, workers=2).model_copy(update={"in_memory": True, "memory": recovery(2, "2")})
    (start,) = driver.state_machine.on_mesh(larger, driver.now)
    assert isinstance(start, StartRanks)
    assert (start.resumed, start.shift) == ((2,), 2), "rank 3 has died meanwhile, and starts anew"


def test_ranks_of_a_worker_of_another_size_start_anew(training: Driver) -> None:
    training.state_machine.on_leave(1, training.now)
    for rank in (0, 1):
        training.tell(rank, Held(1, None, 0.001))
    other = in_memory(2, recovery(1, "0"))
    other = other.model_copy(update={"members": [other.members[0].model_copy(update={"ranks": 1})]})
    assert training.state_machine.on_mesh(other, training.now) == [KillRanks((0, 1))]


@pytest.mark.parametrize("memory", [None, recovery(2, "0-1"), recovery(1, "5")])
def test_a_document_that_keeps_no_rank_ends_all_processes(training: Driver, memory: MemoryRecovery | None) -> None:
    state_machine = training.state_machine
    state_machine.on_leave(1, training.now)
    for rank in (0, 1):
        training.tell(rank, Held(1, None, 0.001))
    assert state_machine.on_mesh(in_memory(2, memory), training.now) == [KillRanks((0, 1))]
    training.exit(0, KILLED)
    (start,) = training.exit(1, KILLED)
    assert isinstance(start, StartRanks)
    assert start.resumed == ()


def test_a_rank_that_the_document_does_not_keep_is_killed_first(training: Driver) -> None:
    state_machine = training.state_machine
    state_machine.on_leave(1, training.now)
    for rank in (0, 1):
        training.tell(rank, Held(1, None, 0.001))
    assert state_machine.on_mesh(in_memory(2, recovery(1, "0")), training.now) == [KillRanks((1,))]
    (start,) = training.exit(1, KILLED)
    assert isinstance(start, StartRanks)
    assert start.resumed == (0,)


def test_a_kept_rank_that_dies_meanwhile_starts_anew(training: Driver) -> None:
    state_machine = training.state_machine
    state_machine.on_leave(1, training.now)
    for rank in (0, 1):
        training.tell(rank, Held(1, None, 0.001))
    training.exit(0, KILLED)
    (start,) = state_machine.on_mesh(in_memory(2, recovery(1, "0-1")), training.now)
    assert isinstance(start, StartRanks)
    assert start.resumed == (1,)


def holding(training: Driver) -> None:
    training.state_machine.on_leave(1, training.now)
    for rank in (0, 1):
        training.tell(rank, Held(1, None, 0.001))


def test_ranks_hold_their_state_for_another_generation_if_one_beside_them_cannot_start(training: Driver) -> None:
    """Such as if the store of the generation does not start: nobody was told to go on."""
    state_machine = training.state_machine
    holding(training)
    (start,) = state_machine.on_mesh(in_memory(2, recovery(1, "0-1")), training.now)
    assert isinstance(start, StartRanks)
    report = build_report(state_machine, training.now)
    assert report.state is AgentState.STARTING
    assert [(rank.pid, rank.held) for rank in report.ranks] == [(100, None), (101, None)]
    state_machine.on_spawned(2, 0, 100, training.now)
    assert state_machine.on_spawn_failed(2, 1, "no store", training.now) == [LeaveRanks(2, (0,))]
    training.tell(0, Held(1, None, 0.001), generation=2)
    report = build_report(state_machine, training.now)
    assert (report.generation, report.state, report.message) == (2, AgentState.FAILED, "no store")
    assert [rank.held for rank in report.ranks] == [HeldState(step=1)] * 2
    (start,) = state_machine.on_mesh(in_memory(3, recovery(2, "0-1")), training.now)
    assert isinstance(start, StartRanks)
    assert start.resumed == (0, 1)


def test_ranks_that_hold_their_state_end_before_others_start_in_their_place(training: Driver) -> None:
    state_machine = training.state_machine
    holding(training)
    state_machine.on_mesh(in_memory(2, recovery(1, "0-1")), training.now)
    state_machine.on_spawn_failed(2, 0, "no store", training.now)
    assert state_machine.on_mesh(in_memory(3), training.now) == [KillRanks((0, 1))]
    assert training.exit(0, KILLED, generation=2) == []
    (start,) = training.exit(1, KILLED, generation=2)
    assert isinstance(start, StartRanks)
    assert start.resumed == ()


def test_a_rank_that_dies_just_before_it_is_told_to_go_on_is_lost(training: Driver) -> None:
    """Its exit still has the number of the generation before."""
    state_machine = training.state_machine
    holding(training)
    state_machine.on_mesh(in_memory(2, recovery(1, "0-1")), training.now)
    for rank in (0, 1):
        state_machine.on_spawned(2, rank, 100 + rank, training.now)
    assert state_machine.on_exit(1, 1, KILLED, (), training.now, 101) == [LeaveRanks(2, (0,))]
    training.tell(0, Held(1, None, 0.001), generation=2)
    report = build_report(state_machine, training.now)
    assert (report.state, report.failure) == (AgentState.FAILED, FailureKind.ERROR)
    assert [rank.held for rank in report.ranks] == [HeldState(step=1), None]
    (start,) = state_machine.on_mesh(in_memory(3, recovery(2, "0")), training.now)
    assert isinstance(start, StartRanks)
    assert start.resumed == (0,)


def test_a_pod_that_stops_ends_ranks_that_hold_their_state(training: Driver) -> None:
    state_machine = training.state_machine
    state_machine.on_leave(1, training.now)
    for rank in (0, 1):
        training.tell(rank, Held(1, None, 0.001))
    assert state_machine.on_shutdown(0, training.now) == [TerminateRanks((0, 1))]


def test_without_the_flag_a_lost_rank_stops_the_others_as_before() -> None:
    driver = Driver()
    driver.start(document())
    driver.tell(0, Running(0))
    driver.tell(1, Running(0))
    assert driver.state_machine.on_leave(1, driver.now) == []
    assert KillRanks((0,)) in driver.exit(1, KILLED)


def test_a_failure_of_its_own_is_reported_with_the_states_of_others(training: Driver) -> None:
    training.tell(1, RankFailed(FailureKind.ERROR, "rank 1: LookupError: boom"))
    training.exit(1, 1)
    training.tell(0, Held(1, None, 0.001))
    report = build_report(training.state_machine)
    assert (report.failure, report.message) == (FailureKind.ERROR, "rank 1: LookupError: boom")


@pytest.mark.parametrize(("since", "kept"), [(1, (0, 1)), (2, ())])
def test_ranks_go_on_although_their_agent_missed_a_generation_in_between(
    training: Driver, since: int, kept: tuple[int, ...]
) -> None:
    state_machine = training.state_machine
    state_machine.on_leave(1, training.now)
    for rank in (0, 1):
        training.tell(rank, Held(1, None, 0.001))
    actions = state_machine.on_mesh(in_memory(3, recovery(since, "0-1")), training.now)
    if not kept:
        assert actions == [KillRanks((0, 1))], "all ranks made steps in generation 2"
        return
    (start,) = actions
    assert isinstance(start, StartRanks)
    assert start.resumed == kept
