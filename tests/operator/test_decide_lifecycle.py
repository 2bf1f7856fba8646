"""Suspension, deadline, completion, time to live, edits, progress and the conditions they leave."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.api.conditions import CHECKPOINT_HEALTHY
from meshwright.api.status import CheckpointStatus, Condition, EvaluationStatus, ParallelTrainingJobStatus
from meshwright.protocol.messages import AgentState, CheckpointCommit, Evaluation, Progress
from meshwright_operator.decide import decide_job
from meshwright_operator.decide.agents import Agents
from meshwright_operator.decide.applied_spec import revision_of
from meshwright_operator.decide.decide_job import decide
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.rejected_job import rejected, unplannable
from tests.operator.builders import NOW, agents, ago, observed, pod, report, running_status, spec

NAN = float("nan")
SUCCEEDED = [pod(worker, phase="Succeeded") for worker in range(4)]


def conditions(decision: Decision | ParallelTrainingJobStatus) -> dict[str, tuple[str, str]]:
    status = decision.status if isinstance(decision, Decision) else decision
    return {c.type: (c.status, c.reason) for c in status.conditions}


def test_a_generation_that_trains_is_ready() -> None:
    decision = decide(observed())
    assert conditions(decision)["Ready"] == ("True", "Running")
    assert conditions(decision)["Reconciling"][0] == conditions(decision)["Stalled"][0] == "False"
    assert decision.status.ready_ranks == "8/8"
    assert not decision.events
    assert decide(observed(status=decision.status)).status == decision.status, "seen twice, it changes nothing"


def test_a_generation_that_starts_is_reconciling() -> None:
    reports = [report(0, AgentState.RUNNING), *(report(w, AgentState.STARTING) for w in range(1, 4))]
    decision = decide(observed(received=agents(reports)))
    assert conditions(decision)["Ready"] == ("False", "Starting")
    assert decision.status.ready_ranks == "2/8"


def test_pods_that_all_ended_well_complete_the_job() -> None:
    decision = decide(observed(SUCCEEDED))
    assert conditions(decision)["Complete"] == ("True", "Completed")
    assert conditions(decision)["Ready"] == ("True", "Completed")
    assert decision.status.completion_time == ago(0)
    assert (decision.status.step, decision.status.tokens_per_second, decision.status.eta_seconds) == (7, None, None)
    assert decision.status.active_seconds == 90
    done = decide(observed(SUCCEEDED, decision.status))
    assert done.status == decision.status


def test_suspension_deletes_pods_and_is_true_when_they_are_gone() -> None:
    first = decide(observed(suspend=True))
    assert len(first.delete) == 4
    assert conditions(first)["Ready"] == ("False", "Suspending")
    assert first.mesh.pending_cause == "Resume"
    second = decide(observed([], first.status, received=Agents(), suspend=True))
    assert conditions(second)["Suspended"] == ("True", "SuspendedByUser")
    assert conditions(second)["Ready"] == ("True", "Suspended")
    assert second.status.ready_ranks == "0/8"
    assert second.status.active_seconds == 90
    third = decide(observed([], second.status, received=Agents()))
    assert conditions(third)["Suspended"][0] == "False"
    assert third.place is not None


@pytest.mark.parametrize(
    ("saved", "healthy", "said"),
    [
        (20, False, "All pods have exited. Latest checkpoint: step 20. Steps 21 to 90 could not be saved, and will be"),
        (90, False, "All pods have exited. Latest checkpoint: step 90"),
        (20, True, "All pods have exited. Latest checkpoint: step 20"),
        (None, False, "All pods have exited. Steps 1 to 90 could not be saved, and will be repeated"),
    ],
)
def test_suspension_says_which_steps_could_not_be_saved(saved: int | None, healthy: bool, said: str) -> None:
    checkpoint = None if saved is None else CheckpointStatus(step=saved, time=ago(30), path="/c")
    status = decide(observed(status=running_status(checkpoint=checkpoint), suspend=True)).status
    status.step = 90
    reason = "CheckpointSaved" if healthy else "SaveFailed"
    moment = {"last_transition_time": ago(60), "observed_generation": 1}
    known = Condition(type=CHECKPOINT_HEALTHY, status=str(healthy), reason=reason, message="", **moment)
    status.conditions = [*status.conditions, known]
    (event,) = decide(observed([], status, received=Agents(), suspend=True)).events
    assert event.message.startswith(said)
    assert event.type == ("Warning" if "could not" in said else "Normal")


@pytest.mark.parametrize(("deadline", "fails"), [(80, True), (91, False)])
def test_deadline(deadline: int, fails: bool) -> None:
    decision = decide(observed(activeDeadlineSeconds=deadline))
    assert (conditions(decision)["Failed"] == ("True", "DeadlineExceeded")) == fails
    assert (len(decision.delete) == 4) == fails
    if not fails:
        assert decision.requeue_after == 1


def test_suspended_time_does_not_count_toward_the_deadline() -> None:
    status = running_status(active_seconds=10, active_since=None)
    decision = decide(observed([], status, received=Agents(), suspend=True, activeDeadlineSeconds=20))
    assert conditions(decision)["Failed"][0] == "False"


@pytest.mark.parametrize(("ttl", "deleted"), [(None, False), (50, True), (70, False)])
def test_time_to_live(ttl: int | None, deleted: bool) -> None:
    done = decide(observed(SUCCEEDED)).status
    done.completion_time = ago(60)
    decision = decide(observed(SUCCEEDED, done, **({} if ttl is None else {"ttlSecondsAfterFinished": ttl})))
    assert decision.delete_job is deleted
    assert decision.requeue_after == (None if ttl is None else ttl - 60)


def test_an_edit_that_changes_the_run_restarts_the_workers() -> None:
    training = {"steps": 99, "globalBatchSize": 8, "sequenceLength": 64}
    decision = decide(observed(training=training))
    assert decision.mesh.pending_cause == "SpecChanged"
    assert len(decision.delete) == 4
    assert decision.status.restarts_toward_limit == 0
    assert decision.status.plan is not None
    assert decision.status.plan.revision == revision_of(spec(training=training))


@pytest.mark.parametrize(
    "edit",
    [{"recovery": {"maxRestarts": 3}}, {"activeDeadlineSeconds": 9999}, {"ttlSecondsAfterFinished": 5}],
)
def test_an_edit_that_takes_effect_at_once_restarts_nobody(edit: dict[str, Any]) -> None:
    decision = decide(observed(**edit))
    assert not decision.delete
    assert conditions(decision)["Ready"] == ("True", "Running")


def test_the_revision_ignores_defaults_written_out() -> None:
    assert revision_of(spec(suspend=False)) == revision_of(spec())
    explicit = {"image": "meshwright/worker", "gpusPerWorker": 2, "terminationGracePeriodSeconds": 60}
    assert revision_of(spec(workers=explicit)) == revision_of(spec())
    assert revision_of(spec(replicas=1)) != revision_of(spec())


def test_progress_is_taken_from_rank_zero() -> None:
    commit = CheckpointCommit(step=5, time="2026-01-02T03:04:00.5+00:00", path="/ckpt/5")
    reports = [report(0, AgentState.RUNNING, checkpoint=commit), *(report(w, AgentState.RUNNING) for w in (1, 2, 3))]
    status = decide(observed(received=agents(reports))).status
    assert (status.step, status.total_steps, status.loss) == (7, 50, "2.25")
    assert (status.tokens_per_second, status.eta_seconds) == (1000, 21)
    assert status.checkpoint == CheckpointStatus(step=5, time="2026-01-02T03:04:00Z", path="/ckpt/5")


@pytest.mark.parametrize(
    ("progress", "commit"),
    [
        (Progress(step=-4, loss=float("nan"), step_seconds=float("inf"), tokens_per_second=1e300), None),
        (Progress(step=3, loss=float("nan"), step_seconds=float("nan"), tokens_per_second=float("inf")), None),
        (Progress(step=1 << 60, loss=1.0), CheckpointCommit(step=-1, time="never", path="x" * 4096)),
    ],
)
def test_numbers_out_of_bounds_do_not_reach_status(progress: Progress, commit: CheckpointCommit | None) -> None:
    reports = [report(0, AgentState.RUNNING, progress=progress, checkpoint=commit)]
    status = decide(observed(received=agents(reports))).status
    ParallelTrainingJobStatus.model_validate(status.wire())


def test_the_newest_evaluation_stays_in_status_when_its_generation_is_over() -> None:
    told = Evaluation(step=6, loss=2.302585093)
    status = decide(observed(received=agents([report(0, AgentState.RUNNING, evaluation=told)]))).status
    assert status.evaluation == EvaluationStatus(step=6, loss="2.30259", perplexity="10")
    later = decide(observed(status=status, received=agents([report(0, AgentState.RUNNING)]))).status
    assert later.evaluation == status.evaluation


@pytest.mark.parametrize(
    ("told", "perplexity"),
    [
        (Evaluation(step=1, loss=1000.0), "inf"),
        (Evaluation(step=-1, loss=1.0), None),
        (Evaluation(step=1, loss=NAN), None),
    ],
)
def test_an_evaluation_is_told_within_the_bounds_of_status(told: Evaluation, perplexity: str | None) -> None:
    status = decide(observed(received=agents([report(0, AgentState.RUNNING, evaluation=told)]))).status
    assert (status.evaluation.perplexity if status.evaluation else None) == perplexity
    ParallelTrainingJobStatus.model_validate(status.wire())


def test_progress_of_an_old_generation_is_not_taken() -> None:
    decision = decide(observed(received=agents([report(0, AgentState.RUNNING, generation=0)])))
    assert decision.status.step is None


def test_a_rejected_spec_is_stalled_and_never_reconciling_too() -> None:
    status = rejected(running_status(), 3, NOW, "InvalidSpec", "spec.replicas: must be at least 1")
    assert conditions(status)["Stalled"] == ("True", "InvalidSpec")
    assert conditions(status)["Reconciling"][0] == "False"
    assert status.observed_generation == 3
    assert status.mesh is not None
    assert status.mesh.generation == 1, "what runs is not forgotten"


def test_a_job_without_a_layout_waits() -> None:
    status = unplannable(ParallelTrainingJobStatus(), 1, NOW, "no node has 16 GPUs")
    assert conditions(status)["Placed"] == ("False", "NoLayout")
    assert conditions(status)["Reconciling"][0] == "True"
    assert conditions(status)["Stalled"][0] == "False"


def test_steps_that_were_lowered_below_the_step_reached_are_not_said_to_be_all() -> None:
    """An edit of `training.steps` to 110 after step 145: nothing is left to do."""
    decision = Decision.of(observed(SUCCEEDED))
    decision.status.step, decision.status.total_steps = 145, 110
    assert decide_job._completion(decision) == (
        "All ranks had completed 145 steps already, more than `spec.training.steps` (110): "
        "training ended in generation 1"
    )
    decision.status.step = 110
    assert decide_job._completion(decision) == "All ranks completed 110 steps in generation 1"
