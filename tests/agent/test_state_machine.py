"""The agent's decisions, table by table: no process, no clock, no network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

import pytest

from meshwright.protocol.messages import AgentState, Evaluation, FailureKind, MeshDocument, MeshRequest, RankWork
from meshwright_worker.agent.state_machine import (
    Action,
    AgentStateMachine,
    DumpStacks,
    ExitAgent,
    KillRanks,
    StartRanks,
    TerminateRanks,
    build_report,
)
from meshwright_worker.rank.messages import (
    AtWork,
    CheckpointSaved,
    Finished,
    PhaseDone,
    RankFailed,
    RankMessage,
    Running,
    StepDone,
    decode,
    encode,
)
from meshwright_worker.rank.task import Outcome, StepReport, Work
from tests.agent.support import mesh, training_run
from tests.runs import command_run

WALL = "2026-01-01T00:00:00Z"
COMPLETE, STOPPED = Finished(Outcome.COMPLETE), Finished(Outcome.STOPPED)
PEER_LOST = RankFailed(FailureKind.PEER_LOST, "rank 0: RuntimeError: Connection closed by peer")
BUG = RankFailed(FailureKind.ERROR, "rank 1: ValueError: bug")


def document(generation: int = 1, *, command: bool = False, workers: int = 1, incarnation: int = 0) -> MeshDocument:
    hellos = [
        MeshRequest(worker=worker, incarnation=incarnation, pod_uid="uid", address=f"10.0.0.{worker}", store_port=20000)
        for worker in range(workers)
    ]
    run = command_run(["x"], 2 * workers) if command else training_run(10, data_parallel=2 * workers)
    return mesh(generation, run, hellos, 2)


class Driver:
    """A core and a clock; spawned ranks get the process id 100 + rank."""

    def __init__(self, worker: int = 0) -> None:
        self.state_machine = AgentStateMachine(worker=worker, incarnation=0, pod_uid="uid", drain_seconds=25.0)
        self.now = 100.0

    def start(self, doc: MeshDocument) -> list[Action]:
        first, *rest = self.state_machine.on_mesh(doc, self.now)
        assert isinstance(first, StartRanks)
        actions: list[Action] = list(rest)
        for rank in range(first.member.first_rank, first.member.first_rank + first.member.ranks):
            actions += self.state_machine.on_spawned(doc.generation, rank, 100 + rank, self.now)
        return actions

    def tell(self, rank: int, *record_message: RankMessage, generation: int = 1) -> list[Action]:
        actions: list[Action] = []
        for message in record_message:
            actions += self.state_machine.on_message(generation, rank, message, self.now, WALL)
        return actions

    def exit(self, rank: int, code: int, tail: Sequence[str] = (), generation: int = 1) -> list[Action]:
        return self.state_machine.on_exit(generation, rank, code, tail, self.now)

    def after(self, seconds: float) -> list[Action]:
        self.now += seconds
        return self.state_machine.on_tick(self.now)


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_from_idle_to_complete(driver: Driver) -> None:
    state_machine = driver.state_machine
    assert state_machine.state is AgentState.IDLE
    assert driver.start(document()) == []
    assert state_machine.state is AgentState.STARTING
    driver.tell(0, Running(0))
    assert state_machine.state is AgentState.STARTING
    driver.tell(1, Running(0))
    assert state_machine.state is AgentState.RUNNING
    driver.tell(0, COMPLETE)
    assert driver.exit(0, 0) == []
    driver.tell(1, COMPLETE)
    assert driver.exit(1, 0) == [ExitAgent(0)]
    assert state_machine.state is AgentState.COMPLETE


def test_an_older_or_equal_generation_is_nothing_new(driver: Driver) -> None:
    driver.start(document(3))
    for generation in (1, 2, 3):
        assert driver.state_machine.on_mesh(document(generation), driver.now) == []
    assert driver.state_machine.generation == 3


def test_new_ranks_wait_for_the_end_of_the_old_ones(driver: Driver) -> None:
    driver.start(document(1))
    assert driver.state_machine.on_mesh(document(2), driver.now) == [KillRanks((0, 1))]
    assert driver.state_machine.has_pending_start
    assert driver.exit(0, -9) == []
    assert driver.after(10) == []
    (start,) = driver.exit(1, -9)
    assert isinstance(start, StartRanks)
    assert start.document.generation == 2
    assert not driver.state_machine.has_pending_start


def test_an_even_newer_generation_takes_the_place_of_a_waiting_one(driver: Driver) -> None:
    driver.start(document(1))
    driver.state_machine.on_mesh(document(2), driver.now)
    assert driver.state_machine.on_mesh(document(3), driver.now) == []
    driver.exit(0, -9)
    (start,) = driver.exit(1, -9)
    assert isinstance(start, StartRanks)
    assert start.document.generation == 3


def test_a_command_gets_a_moment_before_its_generation_is_killed(driver: Driver) -> None:
    driver.start(document(1, command=True))
    assert driver.state_machine.on_mesh(document(2, command=True), driver.now) == [TerminateRanks((0, 1))]
    assert driver.state_machine.deadline == driver.now + 2.0
    assert driver.after(1.9) == []
    assert driver.exit(0, 0) == []
    assert driver.after(0.1) == [KillRanks((1,))]
    assert driver.after(5) == []


@pytest.mark.parametrize("doc", [document(2, incarnation=1), document(2)])
def test_a_mesh_without_this_pod_ends_its_ranks(doc: MeshDocument) -> None:
    driver = Driver(worker=1 if doc.members[0].incarnation == 0 else 0)
    driver.start(document(1, workers=2))
    ranks = (2, 3) if driver.state_machine.worker else (0, 1)
    assert driver.state_machine.on_mesh(doc, driver.now) == [KillRanks(ranks)]
    assert [driver.exit(rank, -9) for rank in ranks] == [[], []]
    assert driver.state_machine.state is AgentState.IDLE
    assert driver.state_machine.generation == 2


def test_an_error_ends_the_other_ranks_at_once(driver: Driver) -> None:
    driver.start(document())
    assert driver.tell(1, BUG) == [KillRanks((0, 1))]
    assert driver.state_machine.state is AgentState.STARTING, "not Failed while a process lives"
    driver.exit(0, -9)
    driver.exit(1, -9)
    report = build_report(driver.state_machine)
    assert (report.state, report.failure, report.message) == (AgentState.FAILED, FailureKind.ERROR, BUG.message)
    assert [process.exit_code for process in report.ranks] == [-9, -9]


def test_a_refusal_stops_the_other_ranks_at_once_and_is_reported(driver: Driver) -> None:
    driver.start(document())
    refusal = RankFailed(FailureKind.REJECTED, "rank 1: InvalidRunError: `training.precision: bf16` needs another GPU")
    driver.tell(0, PEER_LOST)
    assert driver.tell(1, refusal) == [KillRanks((0, 1))]
    driver.exit(0, -9)
    driver.exit(1, 1)
    report = build_report(driver.state_machine)
    assert (report.failure, report.message) == (FailureKind.REJECTED, refusal.message)


def test_a_lost_peer_waits_for_the_cause_in_its_pod(driver: Driver) -> None:
    driver.start(document())
    assert driver.tell(0, PEER_LOST) == []
    assert driver.exit(0, 1) == []
    driver.now += 0.1
    assert driver.tell(1, BUG) == [KillRanks((1,))]
    driver.exit(1, 1)
    assert build_report(driver.state_machine).message == BUG.message


def test_a_lost_peer_without_another_cause_stops_the_rest_after_a_second(driver: Driver) -> None:
    driver.start(document())
    driver.tell(0, PEER_LOST)
    driver.exit(0, 1)
    assert driver.state_machine.deadline == driver.now + 1.0
    assert driver.after(0.5) == []
    assert driver.after(0.5) == [KillRanks((1,))]
    driver.exit(1, -9)
    report = build_report(driver.state_machine)
    assert (report.failure, report.message) == (FailureKind.PEER_LOST, PEER_LOST.message)


def test_a_failed_generation_is_followed_by_a_new_one(driver: Driver) -> None:
    driver.start(document())
    driver.tell(0, BUG)
    driver.exit(0, 1)
    driver.exit(1, -9)
    (start,) = driver.state_machine.on_mesh(document(2), driver.now)
    assert isinstance(start, StartRanks)
    assert build_report(driver.state_machine).failure is None


@pytest.mark.parametrize(
    ("command", "code", "tail", "state", "kind", "message"),
    [
        (True, 0, (), AgentState.COMPLETE, None, ""),
        (True, 143, (), AgentState.IDLE, None, ""),
        (
            True,
            3,
            ("ValueError: x",),
            AgentState.FAILED,
            FailureKind.ERROR,
            "rank 0 exited with code 3: ValueError: x",
        ),
        (True, 1, ("RuntimeError: Connection closed by peer",), AgentState.FAILED, FailureKind.PEER_LOST, "closed"),
        (True, -9, ("Connection closed by peer",), AgentState.FAILED, FailureKind.ERROR, "SIGKILL"),
        (True, -15, (), AgentState.FAILED, FailureKind.ERROR, "SIGTERM"),
        (False, 0, (), AgentState.FAILED, FailureKind.ERROR, "rank 0 exited without finishing the run"),
        (False, 143, (), AgentState.FAILED, FailureKind.ERROR, "exited with code 143"),
        (False, -6, ("what(): Connection reset by peer", ""), AgentState.FAILED, FailureKind.PEER_LOST, "SIGABRT"),
        (False, -11, (), AgentState.FAILED, FailureKind.ERROR, "SIGSEGV"),
    ],
)
def test_how_a_rank_ends(
    driver: Driver,
    command: bool,
    code: int,
    tail: tuple[str, ...],
    state: AgentState,
    kind: FailureKind | None,
    message: str,
) -> None:
    driver.start(document(command=command))
    driver.exit(0, code, tail)
    driver.exit(1, 0 if command and code == 0 else code, tail)
    report = build_report(driver.state_machine)
    assert (report.state, report.failure) == (state, kind)
    assert message in report.message


def test_stopped_because_a_peer_drains(driver: Driver) -> None:
    driver.start(document())
    for rank in (0, 1):
        driver.tell(rank, Running(0), STOPPED)
        assert driver.exit(rank, 0) == []
    assert driver.state_machine.state is AgentState.IDLE
    assert isinstance(driver.state_machine.on_mesh(document(2), driver.now)[0], StartRanks)


def test_drain_lets_ranks_save(driver: Driver) -> None:
    driver.start(document())
    assert driver.state_machine.on_shutdown(143, driver.now) == [TerminateRanks((0, 1))]
    assert driver.state_machine.state is AgentState.DRAINING
    assert driver.state_machine.on_shutdown(143, driver.now + 5) == [], "a second SIGTERM changes nothing"
    assert driver.state_machine.on_mesh(document(2), driver.now) == []
    driver.tell(0, STOPPED)
    driver.exit(0, 0)
    driver.tell(1, STOPPED)
    assert driver.exit(1, 0) == [ExitAgent(143)]
    assert build_report(driver.state_machine).state is AgentState.DRAINING


def test_drain_ends_in_time(driver: Driver) -> None:
    driver.start(document())
    driver.state_machine.on_shutdown(143, driver.now)
    assert driver.state_machine.deadline == driver.now + 25.0
    assert driver.after(24.9) == []
    assert driver.after(0.1) == [DumpStacks((0, 1)), KillRanks((0, 1))]
    driver.exit(0, -9)
    assert driver.exit(1, -9) == [ExitAgent(143)]


def test_a_rank_that_fails_while_draining_is_no_failure_of_the_job(driver: Driver) -> None:
    driver.start(document())
    driver.state_machine.on_shutdown(143, driver.now)
    assert driver.tell(0, PEER_LOST) == []
    assert driver.exit(0, 1) == []
    assert driver.exit(1, 1) == [ExitAgent(143)]
    assert build_report(driver.state_machine).failure is None


def test_a_run_that_ends_while_draining_is_complete(driver: Driver) -> None:
    driver.start(document())
    driver.state_machine.on_shutdown(143, driver.now)
    for rank in (0, 1):
        driver.tell(rank, COMPLETE)
        actions = driver.exit(rank, 0)
    assert actions == [ExitAgent(0)]


def test_a_command_that_ends_well_when_asked_to_stop_is_not_taken_for_complete(driver: Driver) -> None:
    driver.start(document(command=True))
    driver.state_machine.on_shutdown(143, driver.now)
    driver.exit(0, 0)
    assert driver.exit(1, 0) == [ExitAgent(143)]


def test_leaving_without_ranks_ends_at_once(driver: Driver) -> None:
    assert driver.state_machine.on_shutdown(143, driver.now) == [ExitAgent(143)]


def test_leaving_drops_a_generation_that_waits_to_start(driver: Driver) -> None:
    driver.start(document(1))
    driver.state_machine.on_mesh(document(2), driver.now)
    assert driver.state_machine.on_shutdown(143, driver.now) == []
    driver.exit(0, -9)
    assert driver.exit(1, -9) == [ExitAgent(143)]


def test_a_rank_that_cannot_be_started_fails_the_generation(driver: Driver) -> None:
    driver.state_machine.on_mesh(document(), driver.now)
    driver.state_machine.on_spawned(1, 0, 100, driver.now)
    assert driver.state_machine.on_spawn_failed(1, 1, "rank 1 cannot be started: no memory", driver.now) == [
        KillRanks((0,))
    ]
    driver.exit(0, -9)
    assert driver.state_machine.state is AgentState.FAILED
    assert "no memory" in build_report(driver.state_machine).message


def test_what_an_old_generation_says_is_ignored(driver: Driver) -> None:
    driver.start(document(1))
    driver.state_machine.on_mesh(document(2), driver.now)
    driver.exit(0, -9)
    driver.exit(1, -9)
    assert driver.tell(0, BUG, generation=1) == []
    assert driver.exit(1, -9, generation=1) == []
    assert driver.state_machine.state is AgentState.STARTING


def step(number: int, loss: float = 2.0, seconds: float = 0.5) -> StepDone:
    return StepDone(
        StepReport(number, loss, 1.0, 1e-3, 1000, number * 4, seconds, 0.0, checkpoint_stall_seconds=number / 8)
    )


def test_only_the_worker_of_rank_zero_reports_progress() -> None:
    for worker, expected in ((0, 7), (1, None)):
        driver = Driver(worker)
        driver.start(document(workers=2))
        first = 2 * worker
        driver.tell(first, PhaseDone("load", 1.5), Running(6), step(7), CheckpointSaved(7, "/c/step-7", 0.1))
        report = build_report(driver.state_machine)
        assert (report.progress.step if report.progress else None) == expected
        assert (report.checkpoint is not None) == (worker == 0)
        assert [phase.name for phase in report.phases] == (["spawn", "load"] if worker == 0 else [])


def test_the_newest_evaluation_is_reported_only_by_the_worker_of_rank_0() -> None:
    for worker in (0, 1):
        driver = Driver(worker)
        driver.start(document(workers=2))
        first = 2 * worker
        for step, loss in enumerate((None, 2.5, None, math.nan), start=1):
            report = StepReport(
                step, 3.0, 1.0, 0.1, tokens=1, samples=1, seconds=0.1, data_seconds=0.0, evaluation_loss=loss
            )
            driver.tell(first, StepDone(report))
        # What is no number stays out: JSON cannot carry it.
        assert build_report(driver.state_machine).evaluation == (None if worker else Evaluation(step=2, loss=2.5))


def test_progress_is_smoothed_and_the_checkpoint_outlives_its_generation(driver: Driver) -> None:
    driver.start(document(1))
    driver.tell(0, step(1, seconds=1.0), step(2, seconds=0.25), CheckpointSaved(2, "/c/step-2", 0.1))
    progress = build_report(driver.state_machine).progress
    assert progress is not None
    assert (progress.step, progress.samples, progress.checkpoint_stall_seconds) == (2, 8, 0.25)
    assert progress.step_seconds == pytest.approx(0.625)
    assert progress.tokens_per_second == pytest.approx(1600)
    driver.state_machine.on_mesh(document(2), driver.now)
    driver.exit(0, -9)
    driver.exit(1, -9)
    report = build_report(driver.state_machine)
    assert (report.generation, report.progress) == (2, None)
    assert report.checkpoint is not None
    assert (report.checkpoint.step, report.checkpoint.time) == (2, WALL)


def test_a_loss_that_is_no_number_does_not_break_the_report(driver: Driver) -> None:
    driver.start(document())
    driver.tell(0, step(1), step(2, loss=float("nan")))
    progress = build_report(driver.state_machine).progress
    assert progress is not None
    assert (progress.step, progress.has_loss, progress.loss) == (2, False, 0.0)


def test_a_rank_is_idle_since_it_last_said_that_it_is_at_work(driver: Driver) -> None:
    driver.start(document())
    driver.tell(0, step(1))
    driver.after(400.0)
    driver.tell(0, decode(encode(AtWork())))
    driver.after(12.0)
    report = build_report(driver.state_machine, driver.now, lambda _: "R")
    assert [process.idle_seconds for process in report.ranks] == [12.0, 412.0]
    assert report.ranks[0].step == 1


def test_a_rank_is_at_work_until_it_completes_the_phase(driver: Driver) -> None:
    driver.start(document())
    work = Work("tokenize", 3 << 30, 12 << 30, 1, 2, 40.5)
    driver.tell(0, decode(encode(AtWork(work))))
    report = build_report(driver.state_machine)
    assert [process.work for process in report.ranks] == [RankWork(**asdict(work)), None]
    driver.tell(0, decode(encode(AtWork())))
    assert build_report(driver.state_machine).ranks[0].work == RankWork(**asdict(work)), "nothing newer is known"
    driver.tell(0, decode(encode(PhaseDone("data", 60.0))))
    assert build_report(driver.state_machine).ranks[0].work is None


def test_a_command_is_idle_since_its_last_output(driver: Driver) -> None:
    driver.start(document(command=True))
    driver.after(30.0)
    assert driver.state_machine.on_output(1, 0, driver.now) == []
    assert driver.state_machine.on_output(9, 1, driver.now) == [], "of another generation"
    driver.after(12.0)
    report = build_report(driver.state_machine, driver.now, lambda _: "T")
    assert [(process.idle_seconds, process.state) for process in report.ranks] == [(12.0, "T"), (42.0, "T")]
