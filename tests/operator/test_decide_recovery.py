"""What ends a generation, and what counts toward the limit."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from meshwright.api.status import MeshStatus, ParallelTrainingJobStatus
from meshwright.protocol import FailureKind
from meshwright.protocol import WorkerState as AgentState
from meshwright_operator.decide.decision import decide
from meshwright_operator.decide.observed import WorkerState
from meshwright_operator.decide.recovery import Break, Settling, backoff_seconds, diagnose
from meshwright_operator.pods import Pod
from tests.operator.builders import (
    NODES,
    NOW,
    agents,
    ago,
    crashed,
    failed,
    observed,
    pod,
    report,
    running_status,
)

ERROR, PEER = FailureKind.ERROR, FailureKind.PEER_LOST


def test_a_healthy_generation_holds() -> None:
    assert diagnose(observed()) is None


@pytest.mark.parametrize(
    ("changed", "cause", "words"),
    [
        (None, "PodLost", "the pod of worker 2 is gone"),
        (pod(2, deleting=True), "PodLost", "train-w2-0 is being deleted"),
        (pod(2, phase="Failed", disrupted=True), "PodLost", "train-w2-0 was stopped"),
        (crashed(2, code=137), "PodFailed", "train-w2-0 ended with exit code 137"),
    ],
    ids=["gone", "deleting", "evicted", "crashed"],
)
def test_a_pod_that_ends_ends_the_generation(changed: Pod | None, cause: str, words: str) -> None:
    pods = [pod(0), pod(1), pod(3), *([changed] if changed else [])]
    verdict = diagnose(observed(pods))
    assert isinstance(verdict, Break)
    assert (verdict.cause, verdict.message) == (cause, words)


def test_a_pod_that_is_deleted_on_a_dead_node_is_lost() -> None:
    seen = observed([pod(0), pod(1), pod(2, deleting=True), pod(3)], down={**NODES, "n2": True})
    assert seen.workers[2].state is WorkerState.LOST
    verdict = diagnose(seen)
    assert isinstance(verdict, Break)
    assert "lost with node n2" in verdict.message


def test_a_worker_that_is_done_before_the_others_is_no_loss() -> None:
    assert diagnose(observed([pod(0, phase="Succeeded"), pod(1), pod(2), pod(3)])) is None


@pytest.mark.parametrize(
    ("reports", "halted_for", "expected"),
    [
        ([failed(1, ERROR)], 0.5, Settling(1.5)),
        ([failed(1, ERROR)], 2.5, "RankFailure"),
        ([failed(1, PEER), failed(2, PEER)], 2.5, Settling(7.5)),
        ([failed(1, PEER), failed(2, PEER)], 10.5, "RankFailure"),
        ([failed(1, PEER), failed(2, ERROR)], 2.5, "RankFailure"),
        ([failed(1, ERROR, generation=0)], 9.0, None),
    ],
    ids=["settling", "settled", "only peers", "only peers for long", "a root cause", "an old generation"],
)
def test_a_failed_rank_is_judged_after_a_moment(reports, halted_for, expected) -> None:  # type: ignore[no-untyped-def]
    verdict = diagnose(observed(heard=agents(reports, halted_for=halted_for)))
    if isinstance(expected, str):
        assert isinstance(verdict, Break)
        assert verdict.cause == expected
    else:
        assert verdict == expected


def test_the_root_cause_is_told() -> None:
    heard = agents([failed(0, PEER, "connection closed"), failed(2, ERROR, "ZeroDivisionError")], halted_for=3)
    verdict = diagnose(observed(heard=heard))
    assert isinstance(verdict, Break)
    assert verdict.message == "worker 2: ZeroDivisionError"


def test_failing_peers_of_a_dead_node_mean_a_lost_node_at_once() -> None:
    seen = observed(heard=agents([failed(1, PEER)], halted_for=0.1), down={**NODES, "n3": True})
    draft = decide(seen)
    assert draft.mesh.pending_cause == "NodeLost"
    assert [p.name for p in draft.delete] == ["train-w3-0"]


def test_a_dead_node_whose_ranks_train_on_is_left_alone() -> None:
    assert diagnose(observed(down={**NODES, "n3": True})) is None


def test_a_lost_pod_does_not_count_toward_the_limit() -> None:
    draft = decide(observed([pod(0), pod(1), pod(2, deleting=True), pod(3)]))
    assert draft.mesh.pending_cause == "PodLost"
    assert draft.mesh.generation == 1
    assert (draft.status.restart_count, draft.status.restarts_toward_limit) == (1, 0)
    assert draft.status.ready_ranks == "0/8"
    assert [note.reason for note in draft.notes] == ["PodLost"]
    assert not draft.create
    assert draft.place is None, "the pod still runs: no second one may start"


def test_the_incarnation_is_not_raised_while_the_old_pod_drains() -> None:
    draft = decide(observed([pod(0), pod(1), pod(2, deleting=True), pod(3)]))
    assert draft.status.placement is not None
    assert draft.status.placement.workers[2].incarnation == 0


def test_a_second_loss_during_recovery_is_part_of_the_same_restart() -> None:
    mesh = MeshStatus(
        generation=1, master="10.0.0.0:2000", cause="Start", pending_cause="PodLost", pending_since=ago(3)
    )
    status = running_status(mesh=mesh, restart_count=1)
    draft = decide(observed([pod(0), pod(1, deleting=True), pod(3)], status))
    assert draft.status.restart_count == 1
    assert draft.place is None


def test_a_failed_rank_forms_the_next_generation_with_the_same_pods() -> None:
    draft = decide(observed(heard=agents([failed(1, ERROR, "boom")], halted_for=3)))
    assert (draft.mesh.generation, draft.mesh.cause, draft.mesh.pending_cause) == (2, "RankFailure", "")
    assert draft.status.restarts_toward_limit == 1
    assert not draft.delete
    assert not draft.create


def test_ranks_that_failed_too_often_fail_the_job() -> None:
    status = running_status(restarts_toward_limit=2, restart_count=5)
    seen = observed(status=status, heard=agents([failed(1, ERROR, "boom")], halted_for=3), recovery={"maxRestarts": 2})
    draft = decide(seen)
    found = {c.type: (c.status, c.reason) for c in draft.status.conditions}
    assert found["Failed"] == ("True", "RestartLimitReached")
    assert (found["Stalled"][0], found["Reconciling"][0], found["Ready"][0]) == ("True", "False", "False")
    assert len(draft.delete) == 4
    assert draft.status.completion_time
    assert draft.status.active_since is None


def test_a_crash_is_counted_once() -> None:
    first = decide(observed([pod(0), crashed(1, seconds_ago=1), pod(2), pod(3)]))
    assert first.status.restarts_toward_limit == 1
    later = replace(
        observed([pod(0), crashed(1, seconds_ago=1), pod(2), pod(3)], first.status), now=NOW + timedelta(seconds=5)
    )
    second = decide(later)
    assert second.place is not None
    assert second.status.restarts_toward_limit == 1


def test_crashes_before_the_first_generation_use_up_the_limit() -> None:
    status = running_status(mesh=MeshStatus(pending_cause="Start", pending_since=ago(20)), restarts_toward_limit=1)
    pods = [crashed(0, seconds_ago=10), pod(1), pod(2), pod(3)]
    draft = decide(observed(pods, status, recovery={"maxRestarts": 1}))
    assert any(c.type == "Failed" and c.status == "True" for c in draft.status.conditions)


def test_a_fresh_crash_waits_before_the_next_try() -> None:
    status = running_status(mesh=MeshStatus(pending_cause="Start", pending_since=ago(20)), restarts_toward_limit=2)
    draft = decide(observed([crashed(0, seconds_ago=1), pod(1), pod(2), pod(3)], status))
    assert draft.place is None
    assert draft.requeue is not None
    assert 6 < draft.requeue <= 7


@pytest.mark.parametrize(("counted", "seconds"), [(0, 0), (1, 0), (2, 2), (3, 4), (5, 16), (100, 60)])
def test_backoff_grows_to_a_minute(counted: int, seconds: float) -> None:
    assert backoff_seconds(counted) == seconds


def test_reports_that_have_not_come_again_after_a_restart_are_no_failure() -> None:
    trained = decide(observed())
    assert any(c.type == "Ready" and c.reason == "Running" for c in trained.status.conditions)
    again = decide(observed(status=trained.status, heard=agents([])))
    assert again.status == trained.status


def test_a_missing_status_is_not_a_loss() -> None:
    draft = decide(observed(status=ParallelTrainingJobStatus(plan=None), heard=agents([report(0, AgentState.RUNNING)])))
    assert draft.mesh.generation == 2, "pods and agents are there: they get a generation newer than any they know"
    assert draft.status.restart_count == 0


def test_ranks_that_paused_for_nobody_are_started_again() -> None:
    idle = [report(worker, AgentState.IDLE) for worker in range(4)]
    assert isinstance(diagnose(observed(heard=agents(idle, halted_for=1.0))), Settling)
    verdict = diagnose(observed(heard=agents(idle, halted_for=21.0)))
    assert isinstance(verdict, Break)
    assert verdict.cause == "RankFailure"
    draining = [*idle[:3], report(3, AgentState.DRAINING)]
    assert diagnose(observed(heard=agents(draining, halted_for=21.0))) is None, "the pod that drains ends soon"
