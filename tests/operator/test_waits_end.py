"""Every wait ends, and a condition says for what the job waits: rejected pods, absent agents, pods that do not exit."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest

from meshwright.api.conditions import find
from meshwright.api.objects import KubeObject
from meshwright.api.status import MeshStatus, ParallelTrainingJobStatus
from meshwright.protocol.messages import AgentState
from meshwright_operator.decide import gang, gang_actions
from meshwright_operator.decide.agents import Agents, WaitingAgent
from meshwright_operator.decide.decide_job import decide
from meshwright_operator.decide.failure_detection import detect
from meshwright_operator.decide.gang import SILENT_GANG_SECONDS
from meshwright_operator.decide.observed import PodState
from meshwright_operator.decide.placement_outcome import NotGranted, apply_grant
from meshwright_operator.decide.restart_policy import Interruption
from meshwright_operator.decide.stuck_pods import STUCK_SECONDS
from meshwright_operator.kube.client import ApiError
from meshwright_operator.kube.pod_info import Pod, read_pod
from meshwright_operator.scheduling import scheduler
from tests.operator.builders import NOW, agents, ago, crashed, observed, pod, report, running_status
from tests.operator.support import JOBS, PODS
from tests.operator.test_gang_races import small
from tests.operator.world import Agent, World


def pending(seconds: float = 5, **fields: object) -> ParallelTrainingJobStatus:
    mesh = {"generation": 1, "master": "10.0.0.0:2000", "pending_cause": "PodLost", "pending_since": ago(seconds)}
    return running_status(mesh=MeshStatus.model_validate({**mesh, **fields}))


def stuck(worker: int, seconds: float = STUCK_SECONDS + 1) -> Pod:
    return pod(worker, deleting=True, deletion_deadline=NOW - timedelta(seconds=seconds))


# Pods that the kubelet rejects.


@pytest.mark.parametrize("reason", ["OutOfcpu", "OutOfnvidia.com/gpu", "UnexpectedAdmissionError", "NodeAffinity"])
def test_a_pod_that_the_kubelet_rejects_is_recognized(reason: str) -> None:
    metadata = {"name": "train-w1-0", "uid": "u", "labels": {"meshwright.dev/job-name": "train"}}
    status = {"phase": "Failed", "reason": reason, "message": "Pod was rejected"}
    found = read_pod({"metadata": metadata, "spec": {"nodeName": "n1"}, "status": status})
    assert found is not None
    assert (found.rejection, found.disrupted) == (f"{reason}: Pod was rejected", True)
    for other in ({"reason": "Evicted"}, {"reason": "Preempting"}, {"reason": ""}):
        found = read_pod({"metadata": metadata, "spec": {"nodeName": "n1"}, "status": {**status, **other}})
        assert found is not None
        assert not found.rejection


@pytest.mark.parametrize("reason", ["OutOfcpu", "UnexpectedAdmissionError"])
async def test_pods_that_a_node_rejects_are_not_created_there_again(reason: str) -> None:
    world = World(1, nodes=3, work=1e6)
    world.rejecting = {"n0": reason}
    world.submit(small("moved", 2))
    await world.run(6)
    placed = world.condition("moved", "Placed")
    assert (placed["status"], placed["reason"]) == ("False", "PodRejected")
    assert reason in placed["message"]
    assert "n0" in placed["message"]
    await world.run(40)
    assert world.true("moved", "Ready")
    assert {entry["node"] for entry in world.status("moved")["placement"]["workers"]} == {"n1", "n2"}
    assert world.status("moved")["mesh"]["attempts"] == 0
    assert len(world.pods("moved")) == 2, "nothing of the rejected pods is left"


async def test_pods_that_every_node_rejects_are_created_ever_more_rarely() -> None:
    world = World(1, nodes=2, work=1e6)
    world.rejecting = {"n0": "OutOfcpu", "n1": "OutOfcpu"}
    world.submit(small("nowhere", 2))
    await world.run(900)
    assert world.status("nowhere")["mesh"]["attempts"] <= 6
    assert len(world.pods("nowhere")) <= 2


async def test_pods_that_every_node_rejected_start_once_one_accepts_them() -> None:
    world = World(1, nodes=2, work=1e6)
    world.rejecting = {"n0": "OutOfcpu", "n1": "OutOfcpu"}
    world.submit(small("late", 2))
    await world.run(300)
    assert world.status("late")["mesh"]["attempts"] >= 2
    world.rejecting = {}
    await world.run(900)
    assert world.true("late", "Ready"), world.condition("late", "Ready")


def test_ended_pods_of_older_incarnations_are_deleted_but_the_last_that_ran() -> None:
    old = [crashed(1, n) for n in range(3)]
    rejected = replace(crashed(1, 3), exit_code=None, rejection="OutOfcpu: no", disrupted=True)
    decision = decide(observed([pod(0), pod(1, 4), pod(2), pod(3), *old, rejected]))
    assert sorted(p.name for p in decision.delete) == ["train-w1-0", "train-w1-1", "train-w1-3"]


# Pods that the API server does not let start.


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ApiError(403, "Forbidden", 'admission webhook "gates.example.com" denied the request'), "AdmissionDenied"),
        (ApiError(422, "Invalid", "spec: Forbidden: pod updates may not change fields"), "PodsInvalid"),
    ],
)
async def test_pods_whose_gates_cannot_be_removed_end_the_attempt(error: ApiError, reason: str) -> None:
    world = World(1, nodes=2, work=1e6)
    merge_patch, denied = world.cluster.merge_patch, True

    async def deny(path: str, body: KubeObject) -> KubeObject:
        if denied and path.startswith(PODS):
            raise error
        return await merge_patch(path, body)

    world.cluster.merge_patch = deny  # type: ignore[method-assign]
    world.submit(small("gated", 2))
    await world.run(60)
    stalled = world.condition("gated", "Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", reason)
    assert error.message in stalled["message"]
    await world.run(600)
    assert not world.pods(), "between attempts, the nodes are free for others"
    assert world.operators[0].notes.reasons("gated").count("GangStarted") <= 7
    denied = False
    await world.run(700)
    assert world.true("gated", "Ready")


# Agents that never come.


def absent_agent(replacements: int, seconds: float, **fields: object) -> gang_actions.GangAction:
    started = NOW - timedelta(seconds=seconds)
    pods = [pod(w, created=started, started=started) for w in range(4)]
    waiting = {w: WaitingAgent(0, f"10.0.0.{w}", 2000) for w in range(3)}
    received = Agents(waiting_agents=waiting, listening_seconds=10000.0)
    status = pending(10000, agent_replacements=replacements, **fields)
    return gang.next_action(observed(pods, status, received=received), "PodLost")


@pytest.mark.parametrize(("replacements", "wait"), [(0, 120), (1, 240), (2, 480)])
def test_the_pod_of_an_absent_agent_is_replaced_on_another_node_after_ever_longer_waits(
    replacements: int, wait: float
) -> None:
    assert isinstance(absent_agent(replacements, wait - 1), gang_actions.Wait)
    found = absent_agent(replacements, wait)
    assert isinstance(found, gang_actions.Delete)
    assert ([p.name for p in found.pods], list(found.avoid)) == (["train-w3-0"], ["n3"])


def test_after_three_replacements_the_attempt_ends() -> None:
    found = absent_agent(3, 480)
    assert isinstance(found, gang_actions.EndAttempt)
    assert found.reason == "AgentsMissing"
    assert "replaced 3 times" in found.message


async def test_an_agent_that_never_comes_ends_in_a_condition_and_in_fewer_and_fewer_pods(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(1, nodes=6, work=1e6)
    absent = True

    def agent(pod: Pod, address: str) -> Agent:
        return Agent(pod, pod.owner, address, silent=absent and pod.worker == 1)

    monkeypatch.setattr(world, "agent", agent)
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=world.seconds))
    world.submit(small("absent", 2))
    created: set[str] = set()
    stalled: list[bool] = []
    for _ in range(800):
        await world.tick(5.0)
        created |= {p.uid for p in world.pods()}
        if world.condition("absent", "Placed").get("reason") == "AgentsMissing":
            stalled.append(world.true("absent", "Stalled"))
    assert 5 <= len(created) <= 20, "not one every two minutes"
    assert world.status("absent")["mesh"]["agentReplacements"] == 3
    assert stalled
    assert all(stalled)
    absent = False
    await world.run(700, 5.0)
    assert world.true("absent", "Ready")
    assert world.status("absent")["mesh"].get("agentReplacements", 0) == 0


@pytest.mark.parametrize("suspended", [False, True])
async def test_a_gang_has_as_much_time_to_reach_the_operator_after_a_suspension_as_at_first(suspended: bool) -> None:
    world = World(1, nodes=2, work=1e6)
    world.mute = not suspended
    world.submit(small("mute", 2))
    if suspended:
        await world.run(20)
        for value, seconds in ((True, 1000), (False, 0)):
            obj = copy.deepcopy(world.cluster.objects[f"{JOBS}/mute"])
            obj["spec"]["suspend"] = value
            world.cluster.update(f"{JOBS}/mute", obj)
            await world.run(seconds, 5.0)
    world.mute = True
    await world.run(SILENT_GANG_SECONDS - 20, 5.0)
    assert "GangReleased" not in world.operators[0].notes.reasons("mute")
    await world.run(60, 5.0)
    assert "GangReleased" in world.operators[0].notes.reasons("mute")


# Pods that do not terminate.


def test_a_pod_that_does_not_terminate_is_lost_some_time_after_its_grace_period() -> None:
    pods = [pod(0), pod(1), pod(3)]
    assert observed([*pods, stuck(2, STUCK_SECONDS - 1)]).workers[2].state is PodState.ENDING
    seen = observed([*pods, stuck(2)], pending())
    assert seen.workers[2].state is PodState.LOST
    decision = decide(seen)
    assert decision.place is not None
    assert [w.index for w in decision.place.workers] == [2]
    assert "train-w2-0" in decision.blocked_nodes["n2"]


def test_without_another_node_the_job_is_stalled_and_names_the_fix() -> None:
    decision = decide(observed([pod(0), pod(1), stuck(2), pod(3)], pending()))
    apply_grant(decision, NotGranted("3 of 4 workers fit"))
    ready = find(decision.status.conditions, "Ready")
    assert ready is not None
    assert ready.reason == "PodStuckTerminating"
    assert "train-w2-0 on node n2" in ready.message
    assert "--force" in ready.message
    assert any(c.type == "Stalled" and c.status == "True" for c in decision.status.conditions)


def test_a_suspended_job_does_not_wait_for_a_stuck_pod() -> None:
    assert decide(observed([stuck(2, 100)], suspend=True)).requeue_after == pytest.approx(STUCK_SECONDS - 100)
    decision = decide(observed([stuck(2)], suspend=True))
    suspended = find(decision.status.conditions, "Suspended")
    ready = find(decision.status.conditions, "Ready")
    assert suspended is not None
    assert suspended.status == "True"
    assert ready is not None
    assert "--force" in ready.message


async def test_a_gang_continues_on_another_node_than_its_stuck_pod() -> None:
    world = World(1, nodes=3, gpus=4, work=1e6)
    world.submit(small("stuck", 2))
    await world.run(20)
    world.stuck.add("stuck-w1-0")
    node = next(p.node for p in world.pods() if p.worker == 1)
    await world.evict("stuck-w1-0")
    await world.run(60)
    assert world.status("stuck")["mesh"]["generation"] == 1
    assert "to terminate" in world.condition("stuck", "Ready")["message"]
    await world.run(120)
    assert world.true("stuck", "Ready")
    assert world.status("stuck")["mesh"]["generation"] == 2
    new = next(p for p in world.pods() if p.name == "stuck-w1-1")
    assert new.node != node, "the old process may still use its GPUs"
    assert "stuck-w1-0" in {p.name for p in world.pods()}
    assert "PodStuckTerminating" in world.operators[0].notes.reasons("stuck")
    old = world.agents["stuck-w1-0"]
    assert old.generation == 1, "it never joins the new generation"


# Times in status.


@pytest.mark.parametrize("since", [None, "damaged", ago(-86400)])
def test_waits_end_although_the_time_in_status_is_damaged(since: str | None) -> None:
    status = pending()
    assert status.mesh is not None
    status.mesh.pending_since = since
    decision = decide(observed(status=status, received=agents(hello=range(3))))
    assert decision.mesh.pending_since == ago(0)


def test_a_worker_that_drains_for_longer_than_its_grace_period_does_not_stop_the_others_for_ever() -> None:
    reports = [report(w, AgentState.IDLE if w else AgentState.DRAINING) for w in range(4)]
    assert detect(observed(received=agents(reports, halted_seconds=100.0))) is None
    verdict = detect(observed(received=agents(reports, halted_seconds=121.0)))
    assert isinstance(verdict, Interruption)
    assert verdict.cause.name == "RankFailure"


async def test_a_node_is_free_again_as_soon_as_its_stuck_pod_is_known_to_be_gone() -> None:
    world = World(3, nodes=1, work=10**6)
    world.submit(small("lone", 1))
    await world.run(20)
    operator = world.operators[0]
    await world.evict("lone-w0-0")
    operator.blind = True
    await world.run(STUCK_SECONDS + 60)
    assert "does not terminate" in world.condition("lone", "Placed")["message"]
    operator.blind = False
    operator.begin_list()()
    await world.run(30)
    assert world.true("lone", "Ready")


async def test_an_operator_that_restarts_tries_a_node_that_rejects_pods_once_more_and_then_avoids_it() -> None:
    """Which nodes a job avoids is in memory only. How often it failed to start is in status."""
    world = World(9, nodes=3, work=10**6)
    world.rejecting = {"n0": "OutOfcpu"}
    world.submit(small("job", 2))
    for _ in range(60):
        await world.run(1)
        if world.status("job").get("mesh", {}).get("attempts"):
            break
    assert world.status("job")["mesh"]["attempts"] == 1
    world.cluster.watchers.clear()
    world.operators.clear()
    world.operators.append(world.operator())
    reasons = world.operators[0].notes
    await world.run(120)
    assert world.true("job", "Ready")
    assert {pod.node for pod in world.pods("job")} == {"n1", "n2"}
    assert reasons.reasons("job").count("GangReleased") == 1
    assert len(world.started) == 2, "no rank started twice"


async def test_a_job_whose_spec_is_too_large_for_its_status_is_suspended_although_an_edit_does_not_fit() -> None:
    body = small("large", 2)
    body["spec"]["workers"]["env"] = [{"name": f"E{number}", "value": "x" * 4096} for number in range(64)]
    world = World(1, nodes=6, work=1e6)
    world.submit(body)
    await world.run(20)
    assert world.true("large", "Ready")
    assert not world.status("large").get("appliedSpec")
    obj = copy.deepcopy(world.cluster.objects[f"{JOBS}/large"])
    obj["spec"] |= {"suspend": True, "replicas": 4, "workers": {**body["spec"]["workers"], "gpusPerWorker": 8}}
    world.cluster.update(f"{JOBS}/large", obj)
    await world.run(1)
    assert world.pods()
    assert not world.true("large", "Suspended"), "its pods save a checkpoint"
    await world.run(10)
    assert not world.pods()
    assert world.true("large", "Suspended")
