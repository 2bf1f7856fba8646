"""Decisions where clocks differ, budgets end in odd places, and agents tell what no agent should."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from meshwright.api.status import MeshStatus, ParallelTrainingJobStatus
from meshwright.protocol.messages import AgentState, CheckpointCommit, Progress
from meshwright.rules import recovery_times
from meshwright_operator.decide import failure_detection, gang, gang_actions, restart_policy
from meshwright_operator.decide.decide_job import decide
from meshwright_operator.metrics.job_record import JobRecord
from tests.operator.builders import NODES, NOW, agents, ago, crashed, observed, pod, report, running_status

IGNORE_137 = {"recovery": {"exitCodes": [{"action": "Ignore", "values": [137]}]}}


def mesh(**fields: Any) -> MeshStatus:
    return MeshStatus(**{"generation": 5, "master": "10.0.0.0:2000", "cause": "PodFailed", **fields})


def one_crashed(status: ParallelTrainingJobStatus, incarnation: int = 0, **how: Any) -> Any:
    return observed([pod(0), pod(1), pod(2), crashed(3, incarnation, **how)], status, **IGNORE_137)


def test_a_job_that_fails_over_a_stuck_agent_is_not_reconciling() -> None:
    status = running_status(mesh=mesh(generation=2, cause="Hang", started_time=ago(300)))
    stuck = [*(report(w, AgentState.RUNNING, 2) for w in range(3)), report(3, AgentState.STARTING, 1)]
    received = replace(agents(stuck), listening_seconds=1000.0)
    found = {
        c.type: c.status
        for c in decide(observed(None, status, received=received, recovery={"maxRestarts": 0})).status.conditions
    }
    assert (found["Failed"], found["Reconciling"], found["Stalled"]) == ("True", "False", "True")


def test_a_crashed_pod_is_replaced_after_its_pause_also_when_the_crash_was_counted_before() -> None:
    status = running_status(mesh=mesh(failures=8, started_time=ago(20)))
    first = decide(one_crashed(status, code=137, seconds_ago=1))
    assert first.place is None
    second = decide(replace(one_crashed(first.status, code=137, seconds_ago=1), now=NOW + timedelta(seconds=0.1)))
    assert second.place is None
    assert "Backing off before replacing" in next(c.message for c in second.status.conditions if c.type == "Ready")


@pytest.mark.parametrize("ahead", [0, 3600])
def test_no_clock_makes_a_pause_longer_than_it_is(ahead: int) -> None:
    waits = running_status(mesh=mesh(generation=0, pending_cause="Start", pending_since=ago(100)))
    look = one_crashed(waits, seconds_ago=-ahead)
    assert (
        restart_policy.crash_backoff_left(look, failure_detection.uncounted_crashes(look))
        <= recovery_times.LONGEST_BACKOFF_SECONDS
    )
    gathers = running_status(mesh=mesh(pending_cause="RankFailure", pending_since=ago(-ahead), failures=3))
    step = gang.next_action(observed(None, gathers), "RankFailure")
    assert isinstance(step, gang_actions.Wait)
    assert step.seconds is not None
    assert step.seconds <= 4


def test_a_crash_loop_on_a_node_whose_clock_is_behind_is_counted() -> None:
    status = running_status(mesh=mesh(generation=0, pending_cause="Start", pending_since=ago(100)))
    look = one_crashed(status, 40, seconds_ago=3600, code=1)
    assert [worker.index for worker in failure_detection.uncounted_crashes(look)] == [3]


def test_a_pod_on_a_dead_node_does_not_keep_a_job_from_being_suspended() -> None:
    status = running_status(mesh=mesh(generation=1, pending_cause="Resume", pending_since=ago(80000)))
    decision = decide(observed([pod(3, deleting=True)], status, down={**NODES, "n3": True}, suspend=True))
    found = {c.type: c.status for c in decision.status.conditions}
    assert found["Suspended"] == "True"


@pytest.mark.parametrize(
    "progress",
    [
        Progress(step=(1 << 63) - 1, loss=1.0),
        Progress(step=3, loss=1.0, step_seconds=1e300),
        Progress(step=-1, loss=1.0),
    ],
    ids=["step", "seconds", "negative"],
)
def test_progress_that_no_run_makes_leaves_metrics_finite(progress: Progress) -> None:
    record = JobRecord("uid")
    for told in (Progress(step=1, loss=1.0, step_seconds=0.5), progress, Progress(step=2, loss=1.0), progress):
        record.put(running_status(), told, 0.0)
    assert record.productive < 10.0
    assert float(record.lost_steps) < 10.0


@pytest.mark.parametrize("time", ["0001-01-01T00:00:00+14:00", "0001-01-01T00:00:00Z", "never"])
def test_a_checkpoint_from_before_time_is_one_of_now(time: str) -> None:
    reports = [report(w, AgentState.RUNNING) for w in range(4)]
    reports[0] = reports[0].model_copy(update={"checkpoint": CheckpointCommit(step=5, time=time, path="p")})
    found = decide(observed(None, running_status(), received=agents(reports))).status.checkpoint
    assert found is None or found.time == ago(0)
