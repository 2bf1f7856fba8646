"""The job's own policies: exit codes, restart limits, success, and edits that are blocked."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from meshwright.api.conditions import find
from meshwright.api.status import MeshStatus, ParallelTrainingJobStatus
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.placement import place
from meshwright.protocol.messages import AgentState, FailureKind, RankProcess, WorkerReport
from meshwright_operator.controller.status_patch import is_urgent
from meshwright_operator.decide.agents import Agents
from meshwright_operator.decide.applied_spec import encode_spec, running_spec, updated_applied_spec
from meshwright_operator.decide.conditions import BlockedEdit
from meshwright_operator.decide.decide_job import decide
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.observed import Rejection
from meshwright_operator.decide.placement_outcome import Granted, NotGranted, apply_grant
from meshwright_operator.decide.rejected_job import rejected, unplannable
from meshwright_operator.metrics.job_record import phase_of
from meshwright_operator.text import counted, with_warnings
from tests.operator.builders import (
    NOW,
    agents,
    ago,
    crashed,
    observed,
    pod,
    report,
    running_status,
    spec,
)
from tests.operator.kstatus import FAILED, IN_PROGRESS, kstatus
from tests.operator.support import node

FAIL_ON_42 = {"recovery": {"exitCodes": [{"values": [42, 137], "action": "FailJob"}]}}
IGNORE_42 = {"recovery": {"maxRestarts": 0, "exitCodes": [{"values": [42], "action": "Ignore"}]}}
COMMAND: dict[str, Any] = {
    "model": None,
    "data": None,
    "training": None,
    "parallelism": {"tensor": 2, "pipeline": 2},
    "runtime": {"command": ["python", "train.py"]},
}


def conditions(decision: Decision) -> dict[str, tuple[str, str]]:
    return {c.type: (c.status, c.reason) for c in decision.status.conditions}


def ended(worker: int, *codes: int, kind: FailureKind = FailureKind.ERROR) -> WorkerReport:
    """A report of ranks that ended with these codes."""
    ranks = [RankProcess(rank=2 * worker + n, pid=100 + n, exit_code=code) for n, code in enumerate(codes)]
    return report(worker, AgentState.FAILED, failure=kind, message=f"worker {worker} failed", ranks=ranks)


@pytest.mark.parametrize(
    ("reports", "fails"),
    [
        ([ended(1, 42)], True),
        ([ended(1, -9, -15)], True),
        ([ended(1, 42, -15)], True),
        ([ended(1, 1, -9)], False),
        ([ended(1, 1)], False),
        ([ended(1, 1), ended(2, 42, kind=FailureKind.PEER_LOST)], False),
        ([ended(1, 42, kind=FailureKind.PEER_LOST)], True),
    ],
    ids=["named", "killed", "named beside killed", "own code before a kill", "unnamed", "only a peer", "peers alone"],
)
def test_an_exit_code_of_a_rank_can_fail_the_job_at_once(reports: list[WorkerReport], fails: bool) -> None:
    decision = decide(observed(received=agents(reports, halted_seconds=30), **FAIL_ON_42))
    assert (conditions(decision).get("Failed") == ("True", "FailurePolicy")) == fails
    if fails:
        message = next(c.message for c in decision.status.conditions if c.type == "Failed")
        assert "recovery.exitCodes" in message
        assert len(decision.delete) == 4
    else:
        assert (decision.mesh.generation, decision.mesh.cause) == (2, "RankFailure")
        assert decision.status.restarts_toward_limit == 1


@pytest.mark.parametrize("policy", [{}, {"recovery": {"exitCodes": [{"values": [1], "action": "Ignore"}]}}])
def test_a_run_that_ranks_refuse_costs_no_restart(policy: dict[str, Any]) -> None:
    reports = [ended(0, 1, -9, kind=FailureKind.PEER_LOST), ended(1, -9), ended(2, 1, 1, kind=FailureKind.REJECTED)]
    decision = decide(observed(received=agents(reports, halted_seconds=30), **policy))
    stalled = next(c for c in decision.status.conditions if c.type == "Stalled")
    assert (stalled.status, stalled.reason) == ("True", "RunRejected")
    assert "worker 2 failed" in stalled.message
    assert decision.status.restart_count == 0
    assert len(decision.delete) == 4


def test_an_exit_code_of_a_pod_can_fail_the_job_at_once() -> None:
    decision = decide(observed([pod(0), crashed(1, code=137), pod(2), pod(3)], **FAIL_ON_42))
    assert conditions(decision)["Failed"] == ("True", "FailurePolicy")


def test_an_ignored_exit_code_uses_up_no_budget() -> None:
    decision = decide(observed(received=agents([ended(1, 42)], halted_seconds=30), **IGNORE_42))
    assert (decision.mesh.generation, decision.mesh.cause) == (2, "RankFailure")
    assert (decision.status.restart_count, decision.status.restarts_toward_limit) == (1, 0)
    counted = decide(observed(received=agents([ended(1, 43)], halted_seconds=30), **IGNORE_42))
    assert conditions(counted)["Failed"] == ("True", "RestartLimitReached")


@pytest.mark.parametrize(("trained", "row"), [(30, 4), (700, 1)])
def test_the_pause_grows_with_ignored_failures_until_training_holds(trained: int, row: int) -> None:
    """Ten minutes of training end a row; the budget stays as it was."""
    mesh = MeshStatus(generation=1, started_time=ago(trained), failures=3)
    status = running_status(mesh=mesh)
    failing = decide(observed(status=status, received=agents([ended(1, 42)], halted_seconds=30), **IGNORE_42))
    assert failing.mesh.failures == row
    assert failing.status.restarts_toward_limit == 0
    pending = MeshStatus(generation=1, pending_cause="RankFailure", pending_since=ago(1), failures=row)
    after = decide(observed(status=running_status(mesh=pending), received=agents(), **IGNORE_42))
    if row == 1:
        assert (after.mesh.generation, after.mesh.failures) == (2, 1)
    else:
        assert after.mesh.generation == 1, "it waits"
        assert after.requeue_after is not None
        assert 5 < after.requeue_after <= 8


def test_the_first_rule_that_names_the_code_decides() -> None:
    rules = [{"values": [42], "action": "Count"}, {"values": [42], "action": "FailJob"}]
    decision = decide(observed(received=agents([ended(1, 42)], halted_seconds=30), recovery={"exitCodes": rules}))
    assert decision.status.restarts_toward_limit == 1


@pytest.mark.parametrize(("age", "fails"), [(500, True), (600, True), (601, False)])
def test_only_restarts_of_the_window_count(age: int, fails: bool) -> None:
    recovery = {"maxRestarts": 2, "restartWindowSeconds": 600}
    status = running_status(restart_times=[ago(age), ago(100)], restarts_toward_limit=2)
    decision = decide(observed(status=status, received=agents([ended(1, 1)], halted_seconds=30), recovery=recovery))
    assert (conditions(decision).get("Failed") == ("True", "RestartLimitReached")) == fails
    if not fails:
        assert decision.status.restarts_toward_limit == 2
        assert decision.status.restart_times == [ago(100), ago(0)]


def test_a_budget_without_a_window_forgets_nothing() -> None:
    status = running_status(restarts_toward_limit=2)
    decision = decide(
        observed(status=status, received=agents([ended(1, 1)], halted_seconds=30), recovery={"maxRestarts": 3})
    )
    assert (decision.status.restarts_toward_limit, decision.status.restart_times) == (3, [])


@pytest.mark.parametrize(
    ("policy", "pods", "complete"),
    [
        ("AllWorkers", [pod(0, phase="Succeeded"), pod(1), pod(2), pod(3)], False),
        ("FirstWorker", [pod(0, phase="Succeeded"), pod(1), pod(2), pod(3)], True),
        ("FirstWorker", [pod(0), *(pod(w, phase="Succeeded") for w in (1, 2, 3))], False),
        ("AllWorkers", [pod(w, phase="Succeeded") for w in range(4)], True),
    ],
)
def test_success_policy(policy: str, pods: list[Any], complete: bool) -> None:
    fields = {**COMMAND, "successPolicy": policy}
    seen = observed(pods, **fields)
    seen = replace(
        seen, workers=[replace(w, pod=replace(w.pod, revision=seen.revision)) for w in seen.workers if w.pod]
    )
    status = running_status()
    assert status.plan is not None
    status.plan.revision = seen.revision
    decision = decide(replace(seen, status=status))
    assert (conditions(decision).get("Complete") == ("True", "Completed")) == complete
    if complete:
        assert [p.name for p in decision.delete] == [p.name for p in pods if p.phase == "Running"]
        assert decide(replace(seen, status=decision.status)).delete == decision.delete, "until they are gone"


def blocked_edit(**changes: Any) -> Decision:
    return decide(
        replace(observed(**changes), blocked_edit=BlockedEdit("InvalidSpec", "spec.x: must be y", retryable=False))
    )


def test_an_edit_that_is_held_back_is_told_once_and_stops_nobody() -> None:
    first = blocked_edit()
    assert conditions(first)["Stalled"] == ("True", "InvalidSpec")
    assert conditions(first)["Ready"][0] == conditions(first)["Reconciling"][0] == "False"
    assert (first.delete, first.status.ready_ranks, first.mesh.pending_cause) == ([], "8/8", "")
    assert [note.reason for note in first.events] == ["InvalidSpec"]
    second = blocked_edit(status=first.status)
    assert second.status == first.status
    assert second.events == []


def test_a_blocked_edit_of_a_suspended_job_does_not_claim_that_ranks_run() -> None:
    decision = blocked_edit(pods=[], suspend=True)
    ready = find(decision.status.conditions, "Ready")
    assert ready is not None
    assert "stays in effect (Suspended): `spec.suspend` is true" in ready.message


def test_a_blocked_edit_whose_message_ends_with_a_period_is_reported_once() -> None:
    edit = BlockedEdit("InvalidSpec", "spec.x: must be y.", retryable=False)
    first = decide(replace(observed(), blocked_edit=edit))
    assert [event.reason for event in first.events] == ["InvalidSpec"]
    assert decide(replace(observed(status=first.status), blocked_edit=edit)).events == []


def test_the_time_of_ranks_that_train_behind_a_held_edit_counts_as_training() -> None:
    assert phase_of(blocked_edit().status) == "training"
    assert phase_of(decide(observed()).status) == "training"
    assert phase_of(blocked_edit(pods=[pod(0), pod(1, deleting=True), pod(2), pod(3)]).status) == "restarting"
    assert phase_of(rejected(ParallelTrainingJobStatus(), 1, NOW, "InvalidSpec", "spec.x: must be y")) == ""


def test_that_all_ranks_train_or_not_is_written_at_once_even_behind_a_held_edit() -> None:
    all_train = blocked_edit().status.wire()
    none_train = {**all_train, "readyRanks": "0/8"}
    assert is_urgent(all_train, none_train)
    assert is_urgent(none_train, all_train)
    assert not is_urgent(none_train, {**all_train, "readyRanks": "4/8"})


def test_a_gang_behind_a_held_edit_recovers_and_may_end() -> None:
    lost = blocked_edit(pods=[pod(0), pod(1), pod(3)])
    assert lost.mesh.pending_cause == "PodLost"
    assert lost.place is not None
    apply_grant(lost, NotGranted("short by 1 worker"))
    assert conditions(lost)["Stalled"] == ("True", "InvalidSpec")
    ended_well = blocked_edit(pods=[pod(worker, phase="Succeeded") for worker in range(4)])
    assert conditions(ended_well)["Complete"] == conditions(ended_well)["Ready"] == ("True", "Completed")
    assert conditions(ended_well)["Stalled"][0] == "False"


def test_an_edit_that_waits_for_room_is_looked_at_again() -> None:
    decision = decide(
        replace(observed(), blocked_edit=BlockedEdit("EditDoesNotFit", "short by 4 workers", retryable=True))
    )
    assert conditions(decision)["Reconciling"] == ("True", "EditDoesNotFit")
    assert conditions(decision)["Stalled"][0] == "False"
    assert decision.requeue_after is not None
    assert decision.requeue_after <= 15


def test_what_runs_is_found_again_in_status() -> None:
    decision = decide(observed())
    assert decision.status.applied_spec == encode_spec(spec())
    running = running_spec(ParallelTrainingJobStatus.model_validate(decision.status.wire()))
    assert running is not None
    assert running.spec == spec()


def test_each_edit_of_what_runs_is_compared_and_stored_anew() -> None:
    status = running_status(applied_spec=encode_spec(spec()))
    running = running_spec(status)
    assert running is not None
    assert running_spec(status) is running, "the same text is decoded once"
    edited, prioritized = spec(replicas=3), spec(priority=7)
    for _ in range(2):  # what was asked last is remembered
        assert running.runs(spec().wire())
        assert not running.runs(edited.wire())
        assert running.runs(prioritized.wire())
        assert updated_applied_spec(status, spec(), running.revision) == status.applied_spec
        assert '"priority":7' in updated_applied_spec(status, prioritized, running.revision)


@pytest.mark.parametrize(
    "damage",
    [
        {"applied_spec": ""},
        {"applied_spec": "{"},
        {"applied_spec": '{"replicas": -1}'},
        {"applied_spec": encode_spec(spec(replicas=1))},
        {"plan": None},
        {"placement": None, "mesh": None},
    ],
    ids=["missing", "no JSON", "invalid", "another revision", "no plan", "not started"],
)
def test_a_damaged_record_of_what_runs_is_not_believed(damage: dict[str, Any]) -> None:
    status = running_status(applied_spec=encode_spec(spec()))
    assert running_spec(status) is not None
    assert running_spec(status.model_copy(update=damage)) is None


def test_a_spec_too_large_to_be_kept_is_left_out() -> None:
    env = [{"name": f"V{n}", "value": "x" * 4096} for n in range(64)]
    assert encode_spec(spec(workers={"image": "i", "gpusPerWorker": 2, "env": env})) == ""


def test_a_suspended_job_without_a_layout_is_settled() -> None:
    status = unplannable(ParallelTrainingJobStatus(), 1, NOW, "no node has 16 GPUs", suspended=True)
    assert {c.type: c.status for c in status.conditions}["Ready"] == "True"
    resumed = unplannable(status, 2, NOW + timedelta(seconds=5), "no node has 16 GPUs")
    found = {c.type: c.status for c in resumed.conditions}
    assert (found["Ready"], found["Suspended"], found["Reconciling"]) == ("False", "False", "True")


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        ("PodsForbidden", FAILED),
        ("AdmissionDenied", FAILED),
        ("CreateContainerConfigError", FAILED),
        ("QuotaExceeded", IN_PROGRESS),
        ("AdmissionUnavailable", IN_PROGRESS),
    ],
)
def test_what_only_somebody_can_solve_is_stalled_between_attempts(reason: str, state: str) -> None:
    fresh = observed([], ParallelTrainingJobStatus(), received=Agents())
    decision = decide(replace(fresh, rejection=Rejection(reason, "pod train-w0-0: no secret hub")))
    obj = {"metadata": {"generation": 1}, "status": decision.status.wire()}
    assert kstatus(obj) == state
    message = next(c.message for c in decision.status.conditions if c.type == "Ready")
    assert "no secret hub" in message
    waiting = decide(observed([], decision.status, received=Agents(), now=NOW + timedelta(seconds=5)))
    assert kstatus({**obj, "status": waiting.status.wire()}) == state
    trying = decide(observed([], decision.status, received=Agents(), now=NOW + timedelta(seconds=60)))
    assert trying.place is not None


def test_what_was_strange_about_the_nodes_is_told_with_the_placement() -> None:
    decision = decide(observed([], ParallelTrainingJobStatus(), received=Agents()))
    assert decision.place is not None
    inventory = Inventory.from_objects([node(f"n{number}", "") for number in range(4)], [])
    found = place(decision.observed.plan, inventory, {})
    apply_grant(decision, Granted(found, tuple(inventory.warnings)))
    message = next(c.message for c in decision.status.conditions if c.type == "Placed")
    assert message.startswith("4 workers on 4 nodes")
    assert "4 of 4 GPU nodes have no rack label" in message


def test_sentences_count_right() -> None:
    assert (counted(1, "pod"), counted(0, "pod"), counted(2, "pod")) == ("1 pod", "0 pods", "2 pods")
    assert with_warnings("fits", ["a", "b", "c", "d", "e"]) == "fits. Warnings: a; b; c; 2 more"
    one = {"replicas": 1, "parallelism": {"tensor": 1, "pipeline": 1}, "workers": {"image": "i", "gpusPerWorker": 1}}
    decision = decide(observed([], ParallelTrainingJobStatus(), received=Agents(), **one))
    inventory = Inventory.from_objects([node("n0", "r0")], [])
    apply_grant(decision, Granted(place(decision.observed.plan, inventory, {})))
    assert any(note.message.startswith("Placed 1 worker on 1 node in 1 rack,") for note in decision.events)
