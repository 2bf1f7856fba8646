"""What an agent decides when the coordinator asks for a checkpoint: rank 0 is asked once for each request."""

from __future__ import annotations

from meshwright.protocol.messages import CheckpointAnswer, ResumedFrom
from meshwright_worker.agent.state_machine import RequestCheckpoint, build_report
from meshwright_worker.rank.messages import CheckpointBegun, Running
from tests.agent.test_pause_decisions import training
from tests.agent.test_state_machine import Driver, document, step

__all__ = ["training"]


def test_rank_0_is_asked_once_and_the_report_names_the_step(training: Driver) -> None:
    machine = training.state_machine
    assert machine.on_checkpoint_request(1, "a", training.now) == [RequestCheckpoint()]
    assert build_report(machine).checkpoint_request == CheckpointAnswer(request="a")
    assert machine.on_checkpoint_request(1, "a", training.now) == [], "each reply repeats the request"
    training.tell(0, CheckpointBegun(3))
    assert build_report(machine).checkpoint_request == CheckpointAnswer(request="a", step=3)
    assert machine.on_checkpoint_request(1, "b", training.now) == [RequestCheckpoint()]
    assert build_report(machine).checkpoint_request == CheckpointAnswer(request="b")


def test_the_report_says_which_checkpoint_of_another_run_the_ranks_began_from() -> None:
    driver = Driver()
    driver.start(document())
    assert build_report(driver.state_machine).resumed_from is None
    for rank in (0, 1):
        driver.tell(rank, Running(400, "/c/base-0a1b2c3d/step-00000400"), step(401))
    report = build_report(driver.state_machine)
    assert report.resumed_from == ResumedFrom(step=400, path="/c/base-0a1b2c3d/step-00000400")


def test_ranks_that_start_or_stop_are_not_asked() -> None:
    driver = Driver()
    driver.start(document())
    machine = driver.state_machine
    assert machine.on_checkpoint_request(1, "a", driver.now) == [], "a signal would kill a rank that is starting"
    for rank in (0, 1):
        driver.tell(rank, Running(0), step(1))
    assert machine.on_checkpoint_request(2, "a", driver.now) == []
    machine.on_pause(1, driver.now)
    assert machine.on_checkpoint_request(1, "a", driver.now) == []
    assert build_report(machine).checkpoint_request is None
