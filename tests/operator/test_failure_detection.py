"""What ends a generation, and what counts toward the limit."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from meshwright.api.labels import LABEL_JOB, WORKER_CONTAINER
from meshwright.api.status import CheckpointStatus, MeshStatus, ParallelTrainingJobStatus
from meshwright.protocol.messages import AgentState, FailureKind, RankProcess
from meshwright_operator.decide.agents import ReceivedReport
from meshwright_operator.decide.decide_job import decide
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.failure_detection import detect
from meshwright_operator.decide.observed import PodState
from meshwright_operator.decide.placement_outcome import retry_pause
from meshwright_operator.decide.restart_policy import Interruption, Undetermined
from meshwright_operator.kube.pod_info import Pod, read_pod
from meshwright_operator.timestamps import format_time
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
from tests.operator.support import JOBS
from tests.operator.test_decide_lifecycle import conditions
from tests.operator.test_gang_races import small
from tests.operator.world import World

ERROR, PEER = FailureKind.ERROR, FailureKind.PEER_LOST


def test_a_healthy_generation_holds() -> None:
    assert detect(observed()) is None


@pytest.mark.parametrize(
    ("changed", "cause", "words"),
    [
        (None, "PodLost", "The pod of worker 2 no longer exists"),
        (pod(2, deleting=True), "PodLost", "Pod train-w2-0 is being deleted"),
        (pod(2, phase="Failed", disrupted=True), "PodLost", "Pod train-w2-0 was stopped"),
        (
            pod(2, phase="Failed", disrupted=True, disruption="ContainerStatusUnknown"),
            "NodeLost",
            "Pod train-w2-0 is lost, because node n2 has restarted",
        ),
        (crashed(2, code=137), "PodFailed", "Pod train-w2-0 exited with code 137"),
    ],
    ids=["gone", "deleting", "evicted", "node restarted", "crashed"],
)
def test_a_pod_that_ends_ends_the_generation(changed: Pod | None, cause: str, words: str) -> None:
    pods = [pod(0), pod(1), pod(3), *([changed] if changed else [])]
    verdict = detect(observed(pods))
    assert isinstance(verdict, Interruption)
    assert (verdict.cause.name, verdict.message) == (cause, words)


def test_a_pod_that_is_deleted_on_a_dead_node_is_lost() -> None:
    seen = observed([pod(0), pod(1), pod(2, deleting=True), pod(3)], down={**NODES, "n2": True})
    assert seen.workers[2].state is PodState.LOST
    verdict = detect(seen)
    assert isinstance(verdict, Interruption)
    assert "is lost, because node n2 is down" in verdict.message


def test_of_losses_at_once_the_cause_is_the_one_that_brought_the_others() -> None:
    deleted, evicted = pod(0, deleting=True), pod(1, deleting=True, disruption="EvictionByEvictionAPI")
    preempted, lost = pod(2, deleting=True, disruption="PreemptionByScheduler"), pod(3, deleting=True)

    def cause(*pods: Pod, **changes: Any) -> str:
        left = [pod(worker) for worker in range(4) if worker not in {one.worker for one in pods}]
        verdict = detect(observed([*pods, *left], **changes))
        assert isinstance(verdict, Interruption)
        return verdict.cause.name

    assert cause(deleted) == "PodLost"
    assert cause(deleted, evicted) == "Evicted"
    assert cause(deleted, evicted, preempted) == "Preempted"
    assert cause(deleted, evicted, preempted, lost, down={**NODES, "n3": True}) == "NodeLost"


def test_a_worker_that_is_done_before_the_others_is_no_loss() -> None:
    assert detect(observed([pod(0, phase="Succeeded"), pod(1), pod(2), pod(3)])) is None


@pytest.mark.parametrize(
    ("reports", "halted_seconds", "expected"),
    [
        ([failed(1, ERROR)], 0.5, Undetermined(1.5)),
        ([failed(1, ERROR)], 2.5, "RankFailure"),
        ([failed(1, PEER), failed(2, PEER)], 2.5, Undetermined(7.5)),
        ([failed(1, PEER), failed(2, PEER)], 10.5, "RankFailure"),
        ([failed(1, PEER), failed(2, ERROR)], 2.5, "RankFailure"),
        ([failed(1, ERROR, generation=0)], 9.0, None),
        ([failed(0, PEER), failed(1, ERROR), failed(2, PEER), failed(3, PEER)], 0.1, "RankFailure"),
        ([failed(worker, PEER) for worker in range(4)], 0.1, Undetermined(9.9)),
    ],
    ids=[
        "settling",
        "settled",
        "only peers",
        "only peers for long",
        "a root cause",
        "an old generation",
        "all have reported",
        "all have lost peers",
    ],
)
def test_a_failed_rank_is_judged_after_a_moment(reports, halted_seconds, expected) -> None:  # type: ignore[no-untyped-def]
    verdict = detect(observed(received=agents(reports, halted_seconds=halted_seconds)))
    if isinstance(expected, str):
        assert isinstance(verdict, Interruption)
        assert verdict.cause.name == expected
    else:
        assert verdict == expected


def test_a_command_that_stops_although_no_pod_was_deleted_is_named_with_its_exit_code() -> None:
    stopped = agents([report(1, AgentState.IDLE)], halted_seconds=60.0)
    own = {"runtime": {"command": ["python"]}, "replicas": 8, "parallelism": {}}
    own |= dict.fromkeys(("model", "data", "training"))
    for fields, words in (({}, "The ranks of worker 1 stopped"), (own, "The command of worker 1 exited with code 143")):
        verdict = detect(observed(received=stopped, **fields))
        assert isinstance(verdict, Interruption)
        assert verdict.message.startswith(words)


@pytest.mark.parametrize(
    ("kind", "age", "interval", "cause"),
    [
        (PEER, 11.0, 2.0, "PodLost"),
        (PEER, 9.0, 2.0, "RankFailure"),
        (PEER, 11.0, 20.0, "RankFailure"),
        (ERROR, 11.0, 2.0, "RankFailure"),
    ],
    ids=["silent", "reports", "reports rarely", "a rank failed by itself"],
)
def test_peers_of_a_worker_that_is_silent_since_have_not_failed(
    kind: FailureKind, age: float, interval: float, cause: str
) -> None:
    """A node without power is marked as down only after 40 s."""
    failures = agents([failed(0, kind), failed(1, PEER)], halted_seconds=10.5)
    silent = ReceivedReport(report(2, AgentState.RUNNING), age, 0.0, interval)
    verdict = detect(observed(received=replace(failures, reports={**failures.reports, 2: silent})))
    assert isinstance(verdict, Interruption)
    assert verdict.cause.name == cause
    assert verdict.lost == (), "its pod may be well"


def test_the_root_cause_is_told() -> None:
    received = agents([failed(0, PEER, "connection closed"), failed(2, ERROR, "ZeroDivisionError")], halted_seconds=3)
    verdict = detect(observed(received=received))
    assert isinstance(verdict, Interruption)
    assert verdict.message == "Worker 2: ZeroDivisionError"


def test_ranks_that_went_back_restart_at_once_and_count() -> None:
    failures = [failed(index, FailureKind.WENT_BACK, "step 9: went back to step 6") for index in range(4)]
    received = agents(failures, halted_seconds=0.1)
    verdict = detect(observed(received=received))
    assert isinstance(verdict, Interruption)
    assert (verdict.cause.name, verdict.job_failure) == ("LossAnomaly", "")
    assert "went back to step 6" in verdict.message
    decision = decide(observed(received=received, status=running_status()))
    assert decision.status.restarts_toward_limit == 1
    assert not decision.delete


def refused(kind: FailureKind, **fields: Any) -> Decision:
    """The decision about ranks that refuse to start."""
    received = agents([failed(0, ERROR, "x"), failed(2, kind, "use another image")], halted_seconds=3)
    return decide(observed(received=received, **fields))


@pytest.mark.parametrize("saved", [None, CheckpointStatus(step=7, time=ago(30), path="/checkpoints/x")])
@pytest.mark.parametrize("kind", [FailureKind.REJECTED, FailureKind.INVALID_INPUT, FailureKind.CHECKPOINT_INCOMPATIBLE])
def test_a_job_is_not_failed_for_what_an_edit_can_repair(kind: FailureKind, saved: CheckpointStatus | None) -> None:
    """It costs no restart. A checkpoint belongs to its uid: another job with the corrected spec would start at 0."""
    decision = refused(kind, status=running_status(observed_generation=1, checkpoint=saved))
    found = {c.type: (c.status, c.reason) for c in decision.status.conditions}
    reason = {FailureKind.REJECTED: "RunRejected"}.get(kind, kind.value)
    assert decision.status.restart_count == 0
    assert found["Failed"][0] == "False"
    assert found["Stalled"] == ("True", reason)
    assert "use another image" in next(c.message for c in decision.status.conditions if c.type == "Ready")
    assert len(decision.delete) == 4, "its GPUs are free"
    assert decision.mesh.retry_time is not None
    assert (decision.mesh.failures, decision.status.restarts_toward_limit) == (1, 0)
    waits = decide(observed([], decision.status, received=agents([], hello=range(0))))
    assert waits.place is None
    assert conditions(waits.status)["Stalled"] == ("True", reason)
    edited = replace(observed([], decision.status, received=agents([], hello=range(0))), generation=2)
    assert decide(edited).place is not None, "the next attempt starts at once"


COMMAND_RUN: dict[str, Any] = {
    **{"model": None, "data": None, "training": None, "checkpoint": None},
    "runtime": {"command": ["python", "trian.py"]},
    "parallelism": {"tensor": 2, "pipeline": 2},
}


def test_a_rule_for_the_exit_code_of_a_command_precedes() -> None:
    """127 may be a mistake in `runtime.command`, and a rule says what it means in this job."""
    ranks = [RankProcess(rank=4, pid=1, exit_code=127)]
    reports = [report(2, AgentState.FAILED, failure=FailureKind.INVALID_INPUT, message="not found", ranks=ranks)]
    status = running_status(plan=None)
    stalls = decide(observed(status=status, received=agents(reports, halted_seconds=3), **COMMAND_RUN))
    assert conditions(stalls.status)["Stalled"] == ("True", "InvalidInput")
    rule = {"recovery": {"exitCodes": [{"values": [127], "action": "FailJob"}]}}
    fails = decide(observed(status=status, received=agents(reports, halted_seconds=3), **COMMAND_RUN, **rule))
    assert conditions(fails.status)["Failed"] == ("True", "FailurePolicy")


@pytest.mark.parametrize(("limit", "text"), [("8Gi", "limit 8Gi"), (None, "no limit")])
def test_a_worker_that_used_too_much_memory_is_named_with_its_limit(limit: str | None, text: str) -> None:
    terminated = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": format_time(NOW)}
    limits = {"limits": {"memory": limit}} if limit else {}
    raw = {
        "metadata": {"name": "train-w0-0", "namespace": "default", "uid": "u", "labels": {LABEL_JOB: "train"}},
        "spec": {"nodeName": "n0", "containers": [{"name": WORKER_CONTAINER, "resources": limits}]},
        "status": {
            "phase": "Failed",
            "containerStatuses": [{"name": WORKER_CONTAINER, "state": {"terminated": terminated}}],
        },
    }
    killed = read_pod(raw)
    assert killed is not None
    verdict = detect(observed([killed, pod(1), pod(2), pod(3)]))
    assert isinstance(verdict, Interruption)
    said = f"Worker 0 (pod train-w0-0) was killed: out of memory, {text}: raise `spec.workers.resources.memory`"
    assert verdict.message == said


def test_the_pause_before_ranks_may_reject_the_checkpoint_again_doubles() -> None:
    """Each attempt forms a generation, which resets the number of attempts."""
    mesh = MeshStatus(generation=4, master="10.0.0.0:2000", cause="RankFailure", started_time=ago(60), failures=3)
    reports = [failed(worker, FailureKind.CHECKPOINT_INCOMPATIBLE, generation=4) for worker in range(4)]
    decision = decide(observed(status=running_status(mesh=mesh), received=agents(reports, halted_seconds=3)))
    assert decision.mesh.failures == 4
    assert decision.mesh.retry_time == ago(-retry_pause(4))


async def test_a_corrected_spec_continues_from_the_checkpoint_that_ranks_rejected() -> None:
    world = World(7, nodes=2, work=10**6)
    world.submit(small("train", 2))
    await world.run(20)
    for agent in world.agents.values():
        agent.state, agent.failure = AgentState.FAILED, FailureKind.CHECKPOINT_INCOMPATIBLE
    await world.run(10)
    assert world.true("train", "Stalled")
    assert not world.pods()
    path = f"{JOBS}/train"
    new = copy.deepcopy(world.cluster.objects[path])
    new["spec"]["workers"]["image"] = "meshwright/worker:that-saved-it"
    new["metadata"]["generation"] += 1
    world.cluster.update(path, new)
    await world.run(20)
    assert world.true("train", "Ready")
    assert world.status("train")["mesh"]["generation"] == 2


def test_failing_peers_of_a_dead_node_mean_a_lost_node_at_once() -> None:
    seen = observed(received=agents([failed(1, PEER)], halted_seconds=0.1), down={**NODES, "n3": True})
    decision = decide(seen)
    assert decision.mesh.pending_cause == "NodeLost"
    assert [p.name for p in decision.delete] == ["train-w3-0"]


def test_a_dead_node_whose_ranks_train_on_is_left_alone() -> None:
    assert detect(observed(down={**NODES, "n3": True})) is None


def test_a_lost_pod_does_not_count_toward_the_limit() -> None:
    decision = decide(observed([pod(0), pod(1), pod(2, deleting=True), pod(3)]))
    assert decision.mesh.pending_cause == "PodLost"
    assert decision.mesh.generation == 1
    assert (decision.status.restart_count, decision.status.restarts_toward_limit) == (1, 0)
    assert decision.status.ready_ranks == "0/8"
    assert [note.reason for note in decision.events] == ["PodLost"]
    assert not decision.create
    assert decision.place is None, "the pod still runs: no second one may start"


def test_the_incarnation_is_not_raised_while_the_old_pod_drains() -> None:
    decision = decide(observed([pod(0), pod(1), pod(2, deleting=True), pod(3)]))
    assert decision.status.placement is not None
    assert decision.status.placement.workers[2].incarnation == 0


def test_a_second_loss_during_recovery_is_part_of_the_same_restart() -> None:
    mesh = MeshStatus(
        generation=1, master="10.0.0.0:2000", cause="Start", pending_cause="PodLost", pending_since=ago(3)
    )
    status = running_status(mesh=mesh, restart_count=1)
    decision = decide(observed([pod(0), pod(1, deleting=True), pod(3)], status))
    assert decision.status.restart_count == 1
    assert decision.place is None


def test_a_failed_rank_forms_the_next_generation_with_the_same_pods() -> None:
    decision = decide(observed(received=agents([failed(1, ERROR, "boom")], halted_seconds=3)))
    assert (decision.mesh.generation, decision.mesh.cause, decision.mesh.pending_cause) == (2, "RankFailure", "")
    assert decision.status.restarts_toward_limit == 1
    assert not decision.delete
    assert not decision.create


def test_ranks_that_failed_too_often_fail_the_job() -> None:
    status = running_status(restarts_toward_limit=2, restart_count=5)
    seen = observed(
        status=status, received=agents([failed(1, ERROR, "boom")], halted_seconds=3), recovery={"maxRestarts": 2}
    )
    decision = decide(seen)
    found = {c.type: (c.status, c.reason) for c in decision.status.conditions}
    assert found["Failed"] == ("True", "RestartLimitReached")
    assert (found["Stalled"][0], found["Reconciling"][0], found["Ready"][0]) == ("True", "False", "False")
    assert len(decision.delete) == 4
    assert decision.status.completion_time
    assert decision.status.active_since is None


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
    decision = decide(observed(pods, status, recovery={"maxRestarts": 1}))
    assert any(c.type == "Failed" and c.status == "True" for c in decision.status.conditions)


def test_a_fresh_crash_waits_before_the_next_try() -> None:
    status = running_status(mesh=MeshStatus(pending_cause="Start", pending_since=ago(20)), restarts_toward_limit=2)
    decision = decide(observed([crashed(0, seconds_ago=1), pod(1), pod(2), pod(3)], status))
    assert decision.place is None
    assert decision.requeue_after is not None
    assert 6 < decision.requeue_after <= 7


def test_reports_that_have_not_come_again_after_a_restart_are_no_failure() -> None:
    trained = decide(observed())
    assert any(c.type == "Ready" and c.reason == "Running" for c in trained.status.conditions)
    again = decide(observed(status=trained.status, received=agents([])))
    assert again.status == trained.status


def test_a_missing_status_is_not_a_loss() -> None:
    decision = decide(
        observed(status=ParallelTrainingJobStatus(plan=None), received=agents([report(0, AgentState.RUNNING)]))
    )
    assert decision.mesh.generation == 2, "pods and agents are there: they get a generation newer than any they know"
    assert decision.status.restart_count == 0


def test_ranks_that_paused_for_nobody_are_started_again() -> None:
    idle = [report(worker, AgentState.IDLE) for worker in range(4)]
    assert isinstance(detect(observed(received=agents(idle, halted_seconds=1.0))), Undetermined)
    verdict = detect(observed(received=agents(idle, halted_seconds=21.0)))
    assert isinstance(verdict, Interruption)
    assert verdict.cause.name == "RankFailure"
    draining = [*idle[:3], report(3, AgentState.DRAINING)]
    assert detect(observed(received=agents(draining, halted_seconds=21.0))) is None, "the pod that drains ends soon"


def test_the_cause_among_many_failed_workers_is_found_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing each report of a thousand workers with each other one would stop the operator for seconds."""
    received = agents([failed(worker, ERROR if worker % 2 else PEER) for worker in range(4)], halted_seconds=10.5)
    comparisons = []
    monkeypatch.setattr(ReceivedReport, "__eq__", lambda self, other: comparisons.append(other) or self is other)
    verdict = detect(observed(received=received))
    assert isinstance(verdict, Interruption)
    assert "Worker 1" in verdict.message
    assert not comparisons, "of whole reports"
