"""What the operator makes of reports about saves: status, condition and events."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from meshwright.api.conditions import CHECKPOINT_HEALTHY, find
from meshwright.api.goodput import BookedTime, GoodputStatus
from meshwright.api.status import (
    CheckpointStatus,
    Condition,
    MeshStatus,
    ParallelTrainingJobStatus,
    RestartStatus,
    ResumedFromStatus,
)
from meshwright.protocol.messages import AgentState, CheckpointCommit, CheckpointTier, Evaluation, Progress
from meshwright_operator.decide.checkpoint_health import failure_history
from meshwright_operator.decide.decide_job import decide
from meshwright_operator.decide.decision import Decision
from tests.operator.builders import NOW, agents, ago, observed, report, running_status

PLACE = "/meshwright/checkpoints/job-1"
STORE = "s3://bucket/runs/job-1"
EVALUATES = {
    "data": {"source": "PythonStdlib", "heldOut": 0.1},
    "training": {"steps": 100, "globalBatchSize": 16, "sequenceLength": 128, "evaluation": {"everySteps": 20}},
}
SAVED = CheckpointStatus(step=40, time=ago(30), path=f"{PLACE}/step-00000040")


def tier(**fields: Any) -> CheckpointTier:
    base = {"place": PLACE, "every_steps": 20, "step": 40, "saved_at": NOW.timestamp() - 30}
    return CheckpointTier(**{**base, **fields})


def judged(
    *tiers: CheckpointTier,
    step: int = 45,
    later: float = 0.0,
    commit: CheckpointCommit | None = None,
    evaluation: Evaluation | None = None,
    known: Condition | None = None,
    spec: dict[str, Any] | None = None,
    **status: Any,
) -> Decision:
    progress = Progress(step=step, loss=1.0, step_seconds=2.0)
    told = {"checkpoint_tiers": list(tiers), "checkpoint": commit, "evaluation": evaluation}
    sent = report(0, AgentState.RUNNING, progress=progress, **told)
    others = [report(worker, AgentState.RUNNING) for worker in range(1, 4)]
    running = running_status(**{"checkpoint": SAVED, **status})
    if known is not None:
        running.conditions = [*running.conditions, known]
    now = NOW + timedelta(seconds=later)
    saves = {"claimName": "c", "everySteps": 20, **(spec or {})}
    evaluates = EVALUATES if spec is not None else {}
    return decide(observed(status=running, received=agents([sent, *others]), now=now, checkpoint=saves, **evaluates))


def health(decision: Decision) -> Condition | None:
    return find(decision.status.conditions, CHECKPOINT_HEALTHY)


def events(decision: Decision) -> list[tuple[str, str]]:
    reasons = ("SaveFailed", "SaveSlow", "CheckpointOverdue", "CheckpointsRecovered")
    return [(event.reason, event.message) for event in decision.events if event.reason in reasons]


def test_a_job_whose_checkpoints_are_saved_has_no_condition_and_shows_its_tiers() -> None:
    auto = tier(place=STORE, every_steps=None, interval_seconds=120.4, reason="Auto: because")
    decision = judged(tier(), auto)
    assert health(decision) is None
    assert events(decision) == []
    first, second = decision.status.checkpoint_tiers or ()
    assert (first.place, first.step, first.every_steps, first.interval_seconds) == (PLACE, 40, 20, None)
    assert (second.interval_seconds, second.reason, second.error) == (120, "Auto: because", "")


def best_of(decision: Decision) -> list[tuple[int | None, str | None]]:
    return [(found.best_step, found.best_loss) for found in decision.status.checkpoint_tiers or ()]


@pytest.mark.parametrize(
    ("step", "loss", "shown"),
    [
        (20, 2.345678901, (20, "2.34568")),
        (20, float("nan"), (None, None)),
        (20, float("inf"), (None, None)),
        (20, None, (None, None)),
        (None, 2.0, (None, None)),
    ],
)
def test_the_best_checkpoint_is_in_status(
    step: int | None, loss: float | None, shown: tuple[int | None, str | None]
) -> None:
    assert best_of(judged(tier(best_step=step, best_loss=loss))) == [shown]
    wire = judged(tier(best_step=step, best_loss=loss)).status.wire()["checkpointTiers"][0]
    assert ("bestStep" in wire) == ("bestLoss" in wire) == (shown[0] is not None)


def test_a_best_step_that_no_status_can_have_costs_its_tier() -> None:
    assert best_of(judged(tier(best_step=-1, best_loss=1.0), tier(place=STORE))) == [(None, None)]


@pytest.mark.parametrize(
    ("before", "loss", "spec", "best"),
    [
        ((20, 2.0), 1.5, {"keepBest": 1}, (60, "1.5")),
        ((20, 2.0), 2.0, {"keepBest": 1}, (20, "2")),
        ((None, None), 1.5, {"keepBest": 1}, (60, "1.5")),
        ((None, None), 1.5, {}, (None, None)),
        ((None, None), 1.5, {"uri": "s3://bucket/runs", "store": {"keepBest": 1}}, (None, None)),
    ],
)
def test_the_checkpoint_after_the_last_step_may_be_the_best(
    before: tuple[int | None, float | None], loss: float, spec: dict[str, Any], best: tuple[int | None, str | None]
) -> None:
    """Its tier is not reported any more: ranks report tiers with their steps."""
    commit = CheckpointCommit(step=60, time=ago(1), path=f"{PLACE}/step-00000060")
    made = tier(best_step=before[0], best_loss=before[1])
    evaluated = Evaluation(step=60, loss=loss)
    assert best_of(judged(made, commit=commit, evaluation=evaluated, spec=spec, step=61)) == [best]
    other = Evaluation(step=59, loss=loss)
    unchanged = best_of(judged(made, commit=commit, evaluation=other, spec=spec, step=61))
    assert unchanged == [(before[0], f"{before[1]:g}" if before[1] is not None else None)]


def test_a_failed_save_is_an_event_and_a_condition_until_the_next_one_succeeds() -> None:
    broken = tier(error="rank 0: OSError: No space left on device", failing_since=NOW.timestamp() - 5)
    decision = judged(broken)
    found = health(decision)
    assert found is not None
    assert (found.status, found.reason) == ("False", "SaveFailed")
    for part in (PLACE, "No space left on device", "Training continues", "step 40"):
        assert part in found.message
    assert [reason for reason, _ in events(decision)] == ["SaveFailed"]
    assert decision.status.checkpoint_tiers is not None
    assert "No space" in decision.status.checkpoint_tiers[0].error

    again = judged(broken, known=found, later=15)
    assert events(again) == []
    assert health(again) == found
    # A new generation has not saved yet: nobody knows whether the volume works again.
    unknown = judged(tier(), known=found, later=20)
    assert health(unknown) == found
    healed = judged(tier(step=60, saved_at=NOW.timestamp() + 30), known=found, later=30, step=61)
    after = health(healed)
    assert after is not None
    assert (after.status, after.reason) == ("True", "CheckpointSaved")
    assert [reason for reason, _ in events(healed)] == ["CheckpointsRecovered"]


def test_a_commit_that_is_reported_before_its_tier_ends_the_failure() -> None:
    known = Condition(
        type=CHECKPOINT_HEALTHY, status="False", reason="SaveFailed", message="", last_transition_time=ago(10)
    )
    commit = CheckpointCommit(step=60, time=ago(1), path=f"{PLACE}/step-00000060")
    broken = tier(error="OSError: full", failing_since=NOW.timestamp() - 20)
    found = health(judged(broken, commit=commit, known=known, step=61))
    assert found is not None
    assert found.status == "True"


@pytest.mark.parametrize(("store_saved", "healthy"), [(NOW.timestamp() - 60, False), (NOW.timestamp() - 5, True)])
def test_each_tier_has_to_have_a_newer_checkpoint(store_saved: float, healthy: bool) -> None:
    known = Condition(
        type=CHECKPOINT_HEALTHY, status="False", reason="SaveFailed", message="", last_transition_time=ago(10)
    )
    volume = tier(step=60, saved_at=NOW.timestamp() - 1)
    found = health(judged(volume, tier(place=STORE, saved_at=store_saved), known=known, step=61))
    assert found is not None
    assert found.status == str(healthy)


def test_a_commit_on_the_volume_says_nothing_about_the_store() -> None:
    commit = CheckpointCommit(step=60, time=ago(1), path=f"{PLACE}/step-00000060")
    broken = tier(place=STORE, error="CheckpointStoreError: 500")
    decision = judged(tier(), broken, commit=commit, step=61)
    first, second = decision.status.checkpoint_tiers or ()
    assert (first.step, second.step, second.error) == (60, 40, "CheckpointStoreError: 500")
    found = health(decision)
    assert found is not None
    assert (found.status, STORE in found.message) == ("False", True)


def test_a_store_that_fails_is_named_although_the_volume_works() -> None:
    found = health(judged(tier(), tier(place=STORE, error="CheckpointStoreError: 500")))
    assert found is not None
    assert STORE in found.message
    assert PLACE not in found.message


def test_a_save_that_delays_others_is_named() -> None:
    found = health(judged(tier(saving_since=NOW.timestamp() - 90)))
    assert found is not None
    assert (found.reason, ago(90) in found.message) == ("SaveSlow", True)


@pytest.mark.parametrize("tiers", [(tier(),), ()], ids=["agents of this release", "agents of 0.1.0"])
def test_checkpoints_that_stop_advancing_while_steps_do_are_found(tiers: tuple[CheckpointTier, ...]) -> None:
    decision = judged(*tiers, step=200, later=400.0)
    found = health(decision)
    assert found is not None
    assert (found.status, found.reason) == ("False", "CheckpointOverdue")
    assert "every 40 s" in found.message
    assert [reason for reason, _ in events(decision)] == ["CheckpointOverdue"]
    # Steps that stand still are a hang, and no fault of checkpoints.
    assert health(judged(*tiers, step=41, later=400.0)) is None
    early = judged(*tiers, step=70, later=60.0)
    assert health(early) is None
    assert early.requeue_after is not None


@pytest.mark.parametrize(("later", "overdue"), [(169.0, False), (171.0, True)])
def test_a_checkpoint_is_overdue_after_two_intervals_and_two_minutes(later: float, overdue: bool) -> None:
    # The last one was saved 30 s before, and one is due every 20 steps of 2 s.
    assert (health(judged(tier(), step=200, later=later)) is not None) is overdue


@pytest.mark.parametrize(("step", "overdue"), [(130, False), (150, True)])
def test_a_checkpoint_is_overdue_in_a_job_that_restarts_often_and_goes_on_from_memory(step: int, overdue: bool) -> None:
    mesh = MeshStatus(generation=1, cause="PodLost", started_time=ago(-380))
    decision = judged(tier(), step=step, later=400.0, mesh=mesh)
    assert (health(decision) is not None) is overdue
    assert overdue or decision.requeue_after is not None
    found = judged(tier(), step=step, later=100.0, mesh=mesh.model_copy(update={"started_time": ago(-80)}))
    assert health(found) is None, "step times that grow make no checkpoint late"


def test_the_steps_of_another_run_make_no_checkpoint_overdue() -> None:
    began = ResumedFromStatus(step=400, path="/meshwright/checkpoints/base-0a1b2c3d/step-00000400")
    unsaved = tier(step=None, saved_at=None)
    assert health(judged(unsaved, step=410, later=400.0, checkpoint=None, resumed_from=began)) is None
    assert health(judged(unsaved, step=440, later=400.0, checkpoint=None, resumed_from=began)) is not None


def test_numbers_that_no_status_can_have_are_left_out() -> None:
    decision = judged(tier(saved_at=1e300), tier(place=STORE, interval_seconds=-1.0))
    (first,) = decision.status.checkpoint_tiers or ()
    assert first.time is None
    assert health(decision) is None


def test_ranks_get_the_failures_only_for_an_interval_that_needs_them() -> None:
    ledger = GoodputStatus(
        booked=[
            BookedTime(cause="Training", milliseconds=5_000_000),
            BookedTime(cause="Queued", milliseconds=9_000_000),
            BookedTime(cause="Restarting", milliseconds=1_000_000),
        ]
    )
    restarts = [RestartStatus(cause="PodLost", count=2), RestartStatus(cause="Rescaled", count=5)]
    status = ParallelTrainingJobStatus(goodput=ledger, restarts=restarts)
    steps = observed(status=running_status(), checkpoint={"claimName": "c"})
    assert failure_history(steps, status) is None
    auto = observed(status=running_status(), checkpoint={"claimName": "c", "every": "Auto"})
    history = failure_history(auto, status)
    assert history is not None
    assert (history.failures, history.trained_seconds) == (2, 6000.0)
    assert history.nodes == len({worker.node for worker in auto.workers})
