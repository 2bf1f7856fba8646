"""`status.goodput` in virtual time: every second of a job is booked once, whatever happens to job and operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest

from meshwright.api.goodput import BookedTime, GoodputStatus, TimeCause
from meshwright.api.parsing import parse_status
from meshwright.api.status import MeshStatus, ParallelTrainingJobStatus
from meshwright.protocol.messages import AgentState, FailureKind, Progress
from meshwright_operator.controller.status_patch import StatusWriter
from meshwright_operator.decide.decide_job import decide
from meshwright_operator.decide.goodput import goodput_ratio, update_goodput
from meshwright_operator.decide.observed import Observed
from meshwright_operator.decide.time_ledger import seconds_by_cause
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.metrics.job_record import JobRecord
from meshwright_operator.timestamps import format_time
from tests.operator.builders import NOW, agents, ago, failed, observed, report, running_status
from tests.operator.memory import MemoryCluster
from tests.operator.support import JOBS, job
from tests.operator.test_elastic import edit, elastic, set_ready
from tests.operator.world import Operator, VirtualQueue, World

FOREVER = 1e9


def spent(world: World, name: str = "job") -> dict[str, float]:
    """Seconds by cause, from what is written in status."""
    ledger = parse_status(world.cluster.objects[f"{JOBS}/{name}"]).goodput
    return seconds_by_cause(ledger, world.now) if ledger is not None else {}


async def lives(world: World, seconds: int, causes: set[str]) -> None:
    """Lets time pass, and checks that all of it is booked, and to which causes."""
    before = spent(world)
    for _ in range(seconds):
        await world.tick()
        assert sum(spent(world).values()) == pytest.approx(world.seconds(), rel=0.01, abs=1.1)
    after = spent(world)
    grown = {cause for cause in after if after[cause] > before.get(cause, 0.0)}
    assert causes <= grown, f"{before} -> {after}"
    assert grown <= causes | {"Training", "RedoneSteps"}, f"{before} -> {after}"


def kill_the_operator(world: World) -> None:
    world.cluster.watchers.clear()
    world.operators = [Operator(world)]


async def test_booked_seconds_add_up_to_the_life_of_the_job() -> None:
    world = World(4, nodes=2, work=FOREVER)
    world.submit(elastic("job", 2))
    await lives(world, 60, {"Queued", "Starting", "Training"})
    kill_the_operator(world)
    await lives(world, 30, {"Training"})
    for agent in world.agents.values():
        agent.state, agent.failure = AgentState.FAILED, FailureKind.PEER_LOST
    await lives(world, 16, {"Detecting", "Restarting"})
    kill_the_operator(world)
    await lives(world, 20, {"RedoneSteps"})
    edit(world, "job", suspend=True)
    await lives(world, 50, {"RedoneSteps", "Suspended"})
    kill_the_operator(world)
    await lives(world, 50, {"Suspended"})
    edit(world, "job", suspend=False)
    await lives(world, 30, {"Suspended", "Starting", "RedoneSteps"})
    edit(world, "job", replicas=1)
    await lives(world, 30, {"Rescaling", "RedoneSteps"})
    kill_the_operator(world)
    for node in world.nodes:
        set_ready(world, node, ready=False)
    await lives(world, 60, {"Queued"})
    set_ready(world, "n0", ready=True)
    await lives(world, 200, {"Queued", "Restarting", "RedoneSteps"})
    total = spent(world)
    assert total["Suspended"] == pytest.approx(100, abs=5)
    assert total["Detecting"] < 30
    assert set(total) <= set(TimeCause)


@pytest.mark.parametrize("error", [-3600.0, 3600.0])
async def test_a_clock_that_jumps_books_nothing_twice(error: float) -> None:
    world = World(5, nodes=2, work=FOREVER)
    world.submit(elastic("job", 2))
    await world.run(30)
    world.operators[0].clock_error = timedelta(seconds=error)
    edit(world, "job", suspend=True)
    await world.run(30)
    world.operators[0].clock_error = timedelta(0)
    edit(world, "job", suspend=False)
    await world.run(30)
    ledger = parse_status(world.cluster.objects[f"{JOBS}/job"]).goodput
    assert ledger is not None
    booked = sum(entry.milliseconds for entry in ledger.booked) / 1000
    assert 0 <= booked <= world.seconds() + max(0.0, error)


def trains(step: int, **fields: float) -> Observed:
    """A job that trains, of whose steps 100 are booked since 20 s."""
    ledger = GoodputStatus(cause="Training", since=ago(20), step=100, furthest_step=100)
    progress = Progress(step=step, loss=1.0, step_seconds=0.5, **fields)
    reports = [report(worker, AgentState.RUNNING, progress=None if worker else progress) for worker in range(4)]
    status = running_status(goodput=ledger, ready_ranks="8/8", step=100)
    return observed(status=status, received=agents(reports))


def booked_by(seen: Observed) -> tuple[str, dict[str, float]]:
    decision = decide(seen)
    update_goodput(decision, None)
    ledger = decision.status.goodput
    assert ledger is not None
    return ledger.cause, {entry.cause: entry.milliseconds / 1000 for entry in ledger.booked}


def test_steps_and_stalls_from_the_report_of_rank_zero() -> None:
    assert booked_by(trains(130, checkpoint_stall_seconds=4)) == ("Training", {"Training": 16, "CheckpointStall": 4})


def test_a_failure_is_detected_from_its_last_step_on() -> None:
    running = trains(130)
    assert running.status is not None
    reports = [received.report for received in running.agents.reports.values()]
    dead = failed(2, FailureKind.ERROR, "CUDA error")
    received = agents([dead if r.worker == 2 else r for r in reports], halted_seconds=3.0)
    assert booked_by(replace(running, agents=received)) == ("Restarting", {"Training": 15, "Detecting": 5})


def test_a_suspension_is_not_a_failure() -> None:
    running = trains(130)
    stopped = replace(running, spec=running.spec.model_copy(update={"suspend": True}))
    assert booked_by(stopped) == ("Suspended", {"Training": 20})


def test_reports_that_are_missing_after_a_restart_of_the_operator_change_nothing() -> None:
    running = trains(130)
    assert booked_by(replace(running, agents=agents([]))) == ("Training", {})


def test_a_job_of_an_earlier_version_begins_with_what_it_does() -> None:
    running = trains(130)
    old = replace(running, status=running.status.model_copy(update={"goodput": None}))
    assert booked_by(old) == ("Training", {})
    assert booked_by(replace(old, agents=agents([]))) == ("Training", {})


def test_a_finished_job_books_nothing_more() -> None:
    status = running_status(completion_time=format_time(NOW), goodput=GoodputStatus(cause="", since=ago(5)))
    decision = decide(observed(status=status))
    update_goodput(decision, None)
    assert decision.status.goodput == status.goodput


async def test_time_alone_is_not_written() -> None:
    cluster, world = MemoryCluster(lambda: NOW), World(1, nodes=1)
    cluster.put(f"{JOBS}/job", job("job"))
    cache, queue, key = Cache(), VirtualQueue(world), JobKey("default", "job")
    writer = StatusWriter(cluster, cache, queue, world.seconds)

    async def write(change: Callable[[GoodputStatus], None]) -> bool:
        stored = cluster.objects[f"{JOBS}/job"]
        status = parse_status(stored)
        status.mesh = MeshStatus(generation=1)
        status.goodput = status.goodput or GoodputStatus(cause="Starting", since=ago(100))
        change(status.goodput)
        return await writer.write(key, stored, status, False)

    def book(ledger: GoodputStatus) -> None:
        ledger.booked, ledger.since = [BookedTime(cause="Training", milliseconds=5)], ago(50)

    def turn(ledger: GoodputStatus) -> None:
        ledger.cause = "Training"

    assert await write(lambda ledger: None)
    assert not await write(book)
    assert not queue.due, "nor is it tried again"
    assert not await write(turn)
    assert queue.due, "another cause is written with the next progress"
    world.now += timedelta(seconds=10)
    assert await write(turn)


def test_a_counter_grows_between_reconciles_and_never_goes_back() -> None:
    record = JobRecord("uid")
    status = ParallelTrainingJobStatus(goodput=GoodputStatus(cause="Starting", since=ago(0)))
    record.put(status, None, 100.0, seconds={"Queued": 5.0, "Starting": 10.0})
    assert record.exported_seconds(107.0) == {"Queued": 5.0, "Starting": 17.0}
    status = ParallelTrainingJobStatus(goodput=GoodputStatus(cause="Training", since=ago(0)))
    record.put(status, None, 108.0, seconds={"Queued": 5.0, "Starting": 12.0, "Training": 6.0})
    assert record.exported_seconds(200.0) == {"Queued": 5.0, "Starting": 17.0, "Training": 6.0}
    assert goodput_ratio(record.seconds_by_cause(200.0)) == pytest.approx(6 / 23)
    assert goodput_ratio({"Suspended": 8.0}) is None
