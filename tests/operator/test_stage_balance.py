"""`stageBalance: Measured`: layers are dealt again by the times that ranks report, once."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.api.status import ParallelTrainingJobStatus, ResumedFromStatus
from meshwright.protocol.messages import AgentState, Progress, RankProcess
from meshwright.protocol.run_config import NativeRun
from meshwright_operator.decide.decide_job import decide
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.observed import Observed
from tests.operator.builders import agents, observed, plan_status, report, revision_of, running_status, spec
from tests.operator.support import job

FIELDS: dict[str, Any] = {
    "model": {**job("x")["spec"]["model"], "layers": 8},
    "parallelism": {"tensor": 2, "pipeline": 2, "microBatches": 2, "stageBalance": "Measured"},
    "checkpoint": {"claimName": "checkpoints", "everySteps": 10},
}
COUNTED = [4, 4]


def trains(seconds: list[float | None], step: int = 25, status: ParallelTrainingJobStatus | None = None) -> Observed:
    """Four workers of two ranks; `seconds` by pipeline rank. Workers 1 and 3 have the second stage."""
    reports = [
        report(
            worker,
            AgentState.RUNNING,
            ranks=[
                RankProcess(rank=2 * worker + local, pid=1, compute_seconds=seconds[worker % 2]) for local in range(2)
            ],
        )
        for worker in range(4)
    ]
    progress = Progress(step=step, loss=2.0, tokens_per_second=1.0, step_seconds=0.5)
    reports[0] = reports[0].model_copy(update={"progress": progress})
    if status is None:
        status = running_status(plan=plan_status(revision=revision_of(spec(**FIELDS))))
    return observed(status=status, received=agents(reports), **FIELDS)


def split_of(seen: Observed) -> list[int] | None:
    assert isinstance(seen.run, NativeRun)
    return seen.run.parallelism.layer_split


def reasons(decision: Decision) -> dict[str, str]:
    return {event.reason: event.message for event in decision.events}


def test_a_slow_stage_gets_fewer_layers_after_one_restart() -> None:
    before = trains([3.0, 1.2])
    assert split_of(before) == COUNTED
    decision = decide(before)
    plan = decision.status.plan
    assert plan is not None
    assert plan.measured_layers == [2, 6]
    assert decision.mesh.pending_cause == "Rebalanced"
    assert not decision.delete
    assert decision.status.restart_count == 1
    assert decision.status.restarts_toward_limit == 0
    assert reasons(decision)["Rebalanced"] == (
        "Pipeline ranks compute 3000.0, 1200.0 ms per step. Layers of the stages: 2 6 instead of 4 4"
    )
    after = trains([2.0, 2.0], status=decision.status)
    assert split_of(after) == [2, 6]
    assert after.plan.to_status().measured_layers == [2, 6]


def test_it_is_measured_once() -> None:
    status = decide(trains([3.0, 1.2])).status
    assert status.mesh is not None
    mesh = status.mesh.model_copy(update={"pending_cause": "", "generation": 2})
    running = status.model_copy(update={"mesh": mesh})
    seen = trains([1.0, 9.0], step=900, status=running)
    decision = decide(seen)
    assert decision.mesh.pending_cause == ""
    assert decision.status.plan is not None
    assert decision.status.plan.measured_layers == [2, 6]


def test_stages_that_are_even_keep_their_layers() -> None:
    decision = decide(trains([1.0, 1.0 + 1e-3]))
    assert decision.mesh.pending_cause == ""
    assert decision.status.plan is not None
    assert decision.status.plan.measured_layers == COUNTED
    assert "layers stay 4 4" in reasons(decision)["StagesMeasured"]


@pytest.mark.parametrize(
    ("seconds", "step"), [([3.0, 1.2], 19), ([3.0, None], 25), ([None, None], 25)], ids=["warm-up", "silent", "none"]
)
def test_nothing_is_dealt_before_all_ranks_have_times(seconds: list[float | None], step: int) -> None:
    decision = decide(trains(seconds, step))
    assert decision.mesh.pending_cause == ""
    assert decision.status.plan is not None
    assert decision.status.plan.measured_layers is None


def test_the_warm_up_is_counted_from_the_step_of_another_run() -> None:
    began = ResumedFromStatus(step=400, path="/meshwright/checkpoints/base-0a1b2c3d/step-00000400")
    status = running_status(plan=plan_status(revision=revision_of(spec(**FIELDS))), resumed_from=began)
    assert decide(trains([3.0, 1.2], 419, status)).mesh.pending_cause == ""
    assert decide(trains([3.0, 1.2], 425, status)).mesh.pending_cause == "Rebalanced"


def test_an_edit_of_the_layout_drops_what_was_measured() -> None:
    status = decide(trains([3.0, 1.2])).status
    assert status.plan is not None
    kept = status.plan.model_copy(update={"pipeline": 4, "measured_layers": [1, 7, 0, 0]})
    seen = trains([1.0, 1.0], status=status.model_copy(update={"plan": kept}))
    assert split_of(seen) == COUNTED
