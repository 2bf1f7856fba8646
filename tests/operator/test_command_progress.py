"""What the operator makes of the progress of a user's command: status, hangs and completion."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.api.conditions import COMPLETE, READY, find
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright.protocol.messages import Progress, RankProcess, RankWork, WorkerReport
from meshwright.protocol.run_config import CommandRun
from meshwright_operator.decide.agents import Agents
from meshwright_operator.decide.decide_job import decide
from meshwright_operator.decide.hang_detection import seconds_until_hung
from meshwright_operator.decide.mesh_generation import document
from meshwright_operator.decide.observed import Observed
from meshwright_operator.decide.progress import update_progress
from tests.operator.builders import observed, plan_status, pod, revision_of, running_status, spec
from tests.operator.test_hang_detection import received, trains, verdict

COMMAND: dict[str, Any] = {"model": None, "data": None, "training": None}


def command(reports: Agents, progress: dict[str, Any] | None = None, **changes: Any) -> Observed:
    runtime = {"command": ["python", "train.py"], **({"progress": progress} if progress else {})}
    fields = {**COMMAND, "runtime": runtime, "parallelism": {"tensor": 2, "pipeline": 2}}
    seen = observed(received=reports, **fields, **changes)
    assert isinstance(seen.run, CommandRun)
    return seen


def trained(idle: float = 1.0, steps: dict[int, int] | None = None, **fields: Any) -> Agents:
    reports = [trains(worker, idle, step=None) for worker in range(4)]
    progress = Progress(step=40, loss=2.5, tokens_per_second=1000.0, step_seconds=0.5, **fields)
    ranks = [RankProcess(rank=rank, pid=9, step=(steps or {}).get(rank), idle_seconds=idle) for rank in (0, 1)]
    first: WorkerReport = reports[0].model_copy(update={"progress": progress, "ranks": ranks})
    return received([first, *reports[1:]])


def status_of(seen: Observed) -> ParallelTrainingJobStatus:
    status = running_status()
    update_progress(seen, status)
    return status


def test_steps_and_eta_are_those_that_the_command_reports() -> None:
    status = status_of(command(trained(total_steps=100)))
    assert (status.step, status.total_steps, status.loss, status.eta_seconds) == (40, 100, "2.5", 30)
    assert status.tokens_per_second == 1000


def test_the_spec_may_have_the_total() -> None:
    assert status_of(command(trained(), {"totalSteps": 60})).eta_seconds == 10
    assert status_of(command(trained(total_steps=100), {"totalSteps": 60})).total_steps == 100
    assert status_of(command(trained(), {"totalSteps": 20})).eta_seconds == 0, "not negative"


def test_an_unknown_loss_or_throughput_is_empty() -> None:
    status = status_of(command(trained(has_loss=False)))
    assert (status.step, status.loss, status.eta_seconds) == (40, "", None)
    silent = trained()
    first = silent.reports[0].report
    assert first.progress is not None
    slow = first.model_copy(update={"progress": first.progress.model_copy(update={"tokens_per_second": 0.0})})
    assert status_of(command(received([slow]))).tokens_per_second is None


@pytest.mark.parametrize(("idle", "hangs"), [(299.0, False), (301.0, True)])
def test_a_command_that_reports_its_steps_hangs_as_a_rank_of_the_runtime(idle: float, hangs: bool) -> None:
    seen = command(trained(idle, {0: 40}))
    found = verdict(seen)
    assert (found is not None) is hangs
    assert seconds_until_hung(seen) == pytest.approx(300 - idle, abs=2)
    if found is not None:
        assert (found.cause.name, found.worker, found.rank) == ("Hang", 0, 0)
        assert "Last completed step: 40" in found.message


def test_steps_in_the_log_are_no_reason_to_call_it_hung() -> None:
    assert verdict(command(trained(1e5))) is None
    assert seconds_until_hung(command(trained(1e5))) is None


def ready_message(work: RankWork | None, step: int | None = None) -> str:
    seen = trained()
    first = seen.reports[0].report
    ranks = [rank.model_copy(update={"work": work, "step": step}) for rank in first.ranks]
    reports = [first.model_copy(update={"ranks": ranks}), *(seen.reports[worker].report for worker in (1, 2, 3))]
    ready = find(decide(command(received(reports), status=_running_command())).status.conditions, READY)
    assert ready is not None
    assert ready.status == "True"
    return ready.message


def _running_command() -> ParallelTrainingJobStatus:
    fields = {**COMMAND, "runtime": {"command": ["python", "train.py"]}, "parallelism": {"tensor": 2, "pipeline": 2}}
    return running_status(plan=plan_status(revision=revision_of(spec(**fields))))


def test_a_load_that_the_command_reports_is_in_the_message_until_it_is_done() -> None:
    trains = "8 ranks are training in generation 1"
    load = RankWork(name="checkpoint", done=410, total=1000, seconds=10.0)
    assert ready_message(load) == f"{trains}. Loading the checkpoint: 41% of 1 kB at 41 B/s on worker 0"
    assert ready_message(load.model_copy(update={"done": 1000})) == trains
    assert ready_message(load.model_copy(update={"name": "tea"})) == trains
    assert ready_message(None, step=40) == trains


def test_a_command_that_ends_early_completes_without_a_number_of_steps() -> None:
    fields = {**COMMAND, "runtime": {"command": ["x"]}, "parallelism": {"tensor": 2, "pipeline": 2}}
    revision = revision_of(spec(**fields))
    pods = [pod(worker, phase="Succeeded", revision=revision) for worker in range(4)]
    status = running_status(step=40, total_steps=100, plan=plan_status(revision=revision))
    done = find(decide(observed(pods, status, received=trained(), **fields)).status.conditions, COMPLETE)
    assert done is not None
    assert (done.status, done.message) == ("True", "All ranks completed training in generation 1")


@pytest.mark.parametrize(("recovery", "restarts"), [(None, 10), ({"maxRestarts": 3}, 3)])
def test_ranks_learn_how_often_the_job_restarts(recovery: dict[str, Any] | None, restarts: int) -> None:
    seen = command(trained(), **({"recovery": recovery} if recovery else {}))
    told = document(seen, seen.mesh)
    assert told is not None
    assert told.max_restarts == restarts


def test_ranks_of_the_built_in_runtime_have_no_such_variable() -> None:
    seen = observed()
    told = document(seen, seen.mesh)
    assert told is not None
    assert told.max_restarts is None
