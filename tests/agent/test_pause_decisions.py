"""What an agent decides when the coordinator pauses its generation: ranks save and stop, the pod stays."""

from __future__ import annotations

import pytest

from meshwright.protocol.messages import AgentState, FailureKind
from meshwright_worker.agent.state_machine import (
    DumpStacks,
    ExitAgent,
    KillRanks,
    StartRanks,
    TerminateRanks,
    build_report,
)
from meshwright_worker.rank.messages import CheckpointSaved, RankFailed, Running
from tests.agent.test_state_machine import BUG, COMPLETE, PEER_LOST, STOPPED, Driver, document, step


@pytest.fixture
def training() -> Driver:
    """Both ranks of generation 1 have finished a step."""
    driver = Driver()
    driver.start(document())
    for rank in (0, 1):
        driver.tell(rank, Running(0), step(1))
    return driver


def test_ranks_save_and_stop_and_the_agent_waits_for_the_next_generation(training: Driver) -> None:
    state_machine = training.state_machine
    assert not build_report(state_machine).paused
    assert state_machine.on_pause(1, training.now) == [TerminateRanks((0, 1))]
    report = build_report(state_machine)
    assert (report.state, report.paused) == (AgentState.RUNNING, True), "Draining would mean that the pod goes away"
    training.tell(0, CheckpointSaved(2, "/c/step-2", 0.1), STOPPED)
    assert training.exit(0, 0) == []
    training.tell(1, STOPPED)
    assert training.exit(1, 0) == []
    report = build_report(state_machine)
    assert (report.state, report.paused, report.generation) == (AgentState.IDLE, True, 1)
    assert report.checkpoint is not None
    assert report.checkpoint.step == 2
    (start,) = state_machine.on_mesh(document(2), training.now)
    assert isinstance(start, StartRanks)
    assert (state_machine.state, build_report(state_machine).paused) == (AgentState.STARTING, False)


def test_a_pause_that_is_repeated_or_of_another_generation_changes_nothing(training: Driver) -> None:
    state_machine = training.state_machine
    for other in (0, 2):
        assert state_machine.on_pause(other, training.now) == []
        assert not build_report(state_machine).paused
    state_machine.on_pause(1, training.now)
    deadline = state_machine.deadline
    assert deadline == training.now + 25.0
    assert training.after(3.0) == []
    assert state_machine.on_pause(1, training.now) == []
    assert state_machine.deadline == deadline
    for rank in (0, 1):
        training.tell(rank, STOPPED)
        training.exit(rank, 0)
    assert state_machine.on_pause(1, training.now) == [], "its ranks have stopped"
    assert build_report(state_machine).state is AgentState.IDLE
    assert state_machine.deadline is None
    assert isinstance(state_machine.on_mesh(document(2), training.now)[0], StartRanks)
    assert state_machine.on_pause(1, training.now) == [], "of the generation before"


def test_a_pause_before_the_first_generation_is_ignored() -> None:
    driver = Driver()
    assert driver.state_machine.on_pause(0, driver.now) == []
    assert driver.state_machine.on_pause(1, driver.now) == []
    assert not build_report(driver.state_machine).paused


def test_ranks_that_do_not_stop_in_time_are_killed_and_have_not_failed(training: Driver) -> None:
    training.state_machine.on_pause(1, training.now)
    assert training.after(24.9) == []
    assert training.after(0.1) == [DumpStacks((0, 1)), KillRanks((0, 1))]
    assert [training.exit(rank, -9) for rank in (0, 1)] == [[], []]
    report = build_report(training.state_machine)
    assert (report.state, report.failure) == (AgentState.IDLE, None)


def test_a_rank_that_loses_a_peer_or_fails_to_save_while_it_stops_has_not_failed(training: Driver) -> None:
    training.state_machine.on_pause(1, training.now)
    assert training.tell(0, PEER_LOST) == []
    assert training.tell(1, RankFailed(FailureKind.ERROR, "rank 1: OSError: no space")) == []
    assert [training.exit(rank, 1) for rank in (0, 1)] == [[], []]
    report = build_report(training.state_machine)
    assert (report.state, report.failure) == (AgentState.IDLE, None)


@pytest.mark.parametrize("steps", [(), (0,)], ids=["no rank has finished a step", "one rank has"])
def test_ranks_that_have_finished_no_step_have_nothing_to_save_and_are_killed(steps: tuple[int, ...]) -> None:
    driver = Driver()
    driver.start(document())
    for rank in steps:
        driver.tell(rank, Running(0), step(1))
    assert driver.state_machine.on_pause(1, driver.now) == [KillRanks((0, 1))]
    assert [driver.exit(rank, -9) for rank in (0, 1)] == [[], []]
    report = build_report(driver.state_machine)
    assert (report.state, report.failure, report.paused) == (AgentState.IDLE, None, True)
    assert isinstance(driver.state_machine.on_mesh(document(2), driver.now)[0], StartRanks)


@pytest.mark.parametrize("live", [True, False])
def test_a_peer_that_was_paused_earlier_is_not_a_failure_of_this_worker(training: Driver, live: bool) -> None:
    """The peers' pods learn of a pause at slightly different times."""
    training.tell(0, PEER_LOST)
    training.exit(0, 1)
    if not live:
        training.tell(1, PEER_LOST)
        training.exit(1, 1)
        assert training.state_machine.state is AgentState.FAILED
    actions = training.state_machine.on_pause(1, training.now)
    assert actions == ([KillRanks((1,))] if live else []), "without its peer it cannot save"
    if live:
        training.exit(1, -9)
    report = build_report(training.state_machine)
    assert (report.state, report.failure) == (AgentState.IDLE, None)


def test_a_pause_does_not_hide_the_failure_of_a_rank(training: Driver) -> None:
    training.tell(0, PEER_LOST)
    training.tell(1, BUG)
    for rank in (0, 1):
        training.exit(rank, 1)
    assert training.state_machine.on_pause(1, training.now) == []
    report = build_report(training.state_machine)
    assert (report.state, report.failure, report.message) == (AgentState.FAILED, FailureKind.ERROR, BUG.message)


def test_a_run_that_ends_in_a_pause_is_complete(training: Driver) -> None:
    training.state_machine.on_pause(1, training.now)
    for rank in (0, 1):
        training.tell(rank, COMPLETE)
        actions = training.exit(rank, 0)
    assert actions == [ExitAgent(0)]
    assert training.state_machine.state is AgentState.COMPLETE


def test_sigterm_in_a_pause_drains_and_exits(training: Driver) -> None:
    training.state_machine.on_pause(1, training.now)
    training.now += 20.0
    assert training.state_machine.on_shutdown(143, training.now) == [], "the ranks have received SIGTERM"
    assert training.state_machine.state is AgentState.DRAINING
    assert training.state_machine.deadline == training.now + 5.0, "not later than before"
    assert training.state_machine.on_pause(1, training.now) == []
    training.tell(0, STOPPED)
    training.exit(0, 0)
    training.tell(1, STOPPED)
    assert training.exit(1, 0) == [ExitAgent(143)]


def test_sigterm_after_a_pause_exits_at_once(training: Driver) -> None:
    training.state_machine.on_pause(1, training.now)
    for rank in (0, 1):
        training.tell(rank, STOPPED)
        training.exit(rank, 0)
    assert training.state_machine.on_shutdown(143, training.now) == [ExitAgent(143)]


def test_a_new_generation_in_a_pause_kills_at_once(training: Driver) -> None:
    training.state_machine.on_pause(1, training.now)
    assert training.state_machine.on_mesh(document(2), training.now) == [KillRanks((0, 1))]
    assert training.state_machine.on_pause(1, training.now) == []
    training.exit(0, -9)
    (start,) = training.exit(1, -9)
    assert isinstance(start, StartRanks)


def test_a_pause_of_a_generation_that_has_not_started_here_waits_for_its_report(training: Driver) -> None:
    """The next report is of that generation, and its reply has the pause again."""
    state_machine = training.state_machine
    state_machine.on_mesh(document(2), training.now)
    assert state_machine.on_pause(2, training.now) == []
    training.exit(0, -9)
    (start,) = training.exit(1, -9)
    assert isinstance(start, StartRanks)
    for rank in (0, 1):
        state_machine.on_spawned(2, rank, 200 + rank, training.now)
    assert state_machine.on_pause(2, training.now) == [KillRanks((0, 1))]


@pytest.mark.parametrize("codes", [(143, 143), (-9, -9), (-15, 143), (0, 143), (0, 0)])
def test_a_command_is_asked_to_stop_and_any_exit_is_a_stop(codes: tuple[int, int]) -> None:
    """A script that exits with 0 on SIGTERM is not complete. One that is complete exits with 0 again when restarted."""
    driver = Driver()
    driver.start(document(command=True))
    assert driver.state_machine.on_pause(1, driver.now) == [TerminateRanks((0, 1))]
    assert driver.state_machine.deadline == driver.now + 25.0
    assert [driver.exit(rank, code) for rank, code in enumerate(codes)] == [[], []]
    report = build_report(driver.state_machine)
    assert (report.state, report.failure) == (AgentState.IDLE, None)


def test_a_command_that_was_complete_before_stays_complete() -> None:
    driver = Driver()
    driver.start(document(command=True))
    driver.exit(0, 0)
    assert driver.exit(1, 0) == [ExitAgent(0)]
    assert driver.state_machine.on_pause(1, driver.now) == [ExitAgent(0)]
    assert driver.state_machine.state is AgentState.COMPLETE
