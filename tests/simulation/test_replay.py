"""A job's ledger as inputs: its own goodput is in the range of the simulation."""

import math

import pytest

from meshwright.api.goodput import BookedTime, GoodputStatus, TimeCause
from meshwright.api.status import ParallelTrainingJobStatus, RestartStatus
from meshwright.simulation.inputs import FaultKind, Inputs, Phases, Saves
from meshwright.simulation.replay import ReplayError, replay
from meshwright.simulation.run import Outcome, simulate
from meshwright.simulation.setting import Setting
from meshwright.simulation.study import study

SETTING = Setting(
    mtbf=2 * 3600.0,
    interval=1000.0,
    step=5.0,
    work=10 * 86400.0,
    inputs=Inputs(
        faults={
            "RankFailure": FaultKind(share=0.8, cause="RankFailure", detection=20.0),
            "Hang": FaultKind(share=0.2, cause="Hang", detection=300.0),
            "Rescaled": FaultKind(share=0.5, cause="Rescaled", planned=True, detection=0.0, restart=40.0),
        },
        phases=Phases(spawn=30.0, rendezvous=5.0, load=60.0),
        saves=Saves(stall=3.0, durable=0.0),
        start=200.0,
        save_before_stop=0.0,
    ),
)


def status_of(outcome: Outcome, steps: int) -> ParallelTrainingJobStatus:
    """The status of a job whose time was spent like that."""
    booked = [BookedTime(cause=cause, milliseconds=round(1000 * value)) for cause, value in outcome.seconds.items()]
    restarts = [RestartStatus(cause=name, count=count) for name, count in outcome.failures.items()]
    return ParallelTrainingJobStatus(goodput=GoodputStatus(booked=booked, furthest_step=steps), restarts=restarts)


@pytest.mark.parametrize("seed", range(5))
def test_a_ledger_replays(seed: int) -> None:
    outcome = simulate(SETTING, seed)
    steps = round(SETTING.work / SETTING.step)
    found = replay(status_of(outcome, steps), 200, SETTING)
    assert found.goodput == pytest.approx(outcome.goodput, abs=1e-6)
    assert found.setting.step == pytest.approx(5.0)
    assert set(found.setting.inputs.faults) == set(outcome.failures)
    result = study(found.setting, 40)
    low, high = result.between(lambda one: one.goodput, 0.99)
    assert low - 0.005 <= outcome.goodput <= high + 0.005
    for cause in (TimeCause.REDONE_STEPS, TimeCause.DETECTING, TimeCause.RESTARTING, TimeCause.RESCALING):
        low, high = result.between(lambda one, cause=cause: one.seconds[cause], 1.0)  # type: ignore[misc]
        assert low <= outcome.seconds[cause] <= high


def test_a_job_that_never_failed() -> None:
    booked = [BookedTime(cause="Training", milliseconds=10**6), BookedTime(cause="Queued", milliseconds=10**6)]
    found = replay(ParallelTrainingJobStatus(goodput=GoodputStatus(booked=booked, furthest_step=100)), None, SETTING)
    assert math.isinf(found.setting.mtbf)
    assert math.isinf(found.setting.interval)
    assert found.goodput == 1.0  # the queue is the cluster's
    assert study(found.setting, 2).goodput == 1.0


def test_a_status_without_steps_is_rejected() -> None:
    with pytest.raises(ReplayError, match="goodput` is missing"):
        replay(ParallelTrainingJobStatus(), 100, SETTING)
    empty = ParallelTrainingJobStatus(goodput=GoodputStatus(booked=[BookedTime(cause="Queued", milliseconds=5)]))
    with pytest.raises(ReplayError, match="has not finished a step"):
        replay(empty, 100, SETTING)
