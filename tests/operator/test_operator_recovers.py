"""The whole operator against an API server: pods lost, ranks failed, and the operator itself going away."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from meshwright.api.labels import LABEL_JOB
from meshwright.protocol.messages import FailureKind
from meshwright_operator.decide import failure_detection
from tests.operator.agents import Kubelet
from tests.operator.conftest import Settled, StartOperator
from tests.operator.support import JOBS, PODS, Api, condition, job, until
from tests.patience import LEAST_SECONDS


async def generation(api: Api, name: str, number: int) -> dict[str, Any]:
    """Waits until that generation runs with all ranks."""

    async def check() -> dict[str, Any] | None:
        status = await api.status(name)
        running = condition(status, "Ready").get("reason") == "Running"
        return status if running and status["mesh"]["generation"] == number else None

    status: dict[str, Any] = await until(check, f"generation {number} of {name} runs", 20)
    return status


async def failed(api: Api, name: str) -> dict[str, Any]:
    """Waits until the job has failed."""

    async def check() -> dict[str, Any] | None:
        status = await api.status(name)
        return status if condition(status, "Failed").get("status") == "True" else None

    status: dict[str, Any] = await until(check, f"{name} fails")
    return status


async def stalled(api: Api, name: str) -> dict[str, Any]:
    """Waits until the job is Stalled."""

    async def check() -> dict[str, Any] | None:
        status = await api.status(name)
        return status if condition(status, "Stalled").get("status") == "True" else None

    status: dict[str, Any] = await until(check, f"{name} stalls")
    return status


async def names(api: Api, name: str) -> set[str]:
    return {pod["metadata"]["name"] for pod in await api.pods(name)}


@pytest.mark.parametrize(("code", "reason"), [(137, "ContainerStatusUnknown"), (255, "Unknown")])
async def test_a_pod_whose_node_has_restarted_uses_up_no_restart(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled, code: int, reason: str
) -> None:
    """A node that is back within 40 s was never down for Kubernetes. Its kubelet finds no container, or a dead one."""
    await start_operator()
    await api.create(JOBS, job("rebooted", recovery={"maxRestarts": 0}))
    await settled("rebooted")
    ended = {"exitCode": code, "reason": reason, "startedAt": None, "finishedAt": None}
    container = {"name": "worker", "state": {"terminated": ended}}
    status = {"phase": "Failed", "containerStatuses": [container]}
    await api.patch(f"{PODS}/rebooted-w2-0/status", {"status": status})
    found = await generation(api, "rebooted", 2)
    assert found["restarts"] == [{"cause": "NodeLost", "count": 1}]
    assert found["restartsTowardLimit"] == 0


async def test_a_deleted_pod_is_replaced_and_the_rest_stays(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    await start_operator()
    await api.create(JOBS, job("lost"))
    before = await settled("lost")
    await api.delete(f"{PODS}/lost-w2-0")
    status = await generation(api, "lost", 2)
    assert await names(api, "lost") == {"lost-w0-0", "lost-w1-0", "lost-w2-1", "lost-w3-0"}
    assert status["mesh"]["cause"] == "PodLost"
    assert status["restarts"] == [{"cause": "PodLost", "count": 1}]
    assert (status["restartCount"], status["restartsTowardLimit"]) == (1, 0)
    stayed = {e["worker"]: e["node"] for e in before["placement"]["workers"] if e["worker"] != 2}
    assert stayed == {e["worker"]: e["node"] for e in status["placement"]["workers"] if e["worker"] != 2}
    for agent in kubelet.of("lost"):
        assert [d.generation for d in agent.documents] == ([2] if agent.worker == 2 else [1, 2])
        assert agent.refused == []
    assert kubelet.of("lost")[0].documents[-1].members[2].incarnation == 1

    async def told() -> str | None:
        events = [event for event in await api.events("lost") if event["reason"] == "Recovered"]
        return str(events[0]["message"]) if events else None

    message = await until(told, "the recovery is told by phase")
    assert all(part in message for part in ("Training again after", "drain", "replace pod", "first step 0.2"))


async def test_a_pod_deleted_by_force_is_replaced(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    await start_operator()
    await api.create(JOBS, job("forced"))
    await settled("forced")
    await api.delete(f"{PODS}/forced-w0-0", grace=0)
    kubelet._end("forced-w0-0")
    status = await generation(api, "forced", 2)
    assert await names(api, "forced") == {"forced-w0-1", "forced-w1-0", "forced-w2-0", "forced-w3-0"}
    assert status["mesh"]["master"].split(":")[0] == kubelet.of("forced")[0].address


async def test_a_failed_rank_restarts_the_ranks_in_the_same_pods(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    await start_operator()
    await api.create(JOBS, job("rank"))
    await settled("rank")
    agents = kubelet.of("rank")
    await agents[0].fail(FailureKind.PEER_LOST, "connection closed by peer")
    await agents[1].fail(FailureKind.ERROR, "ValueError: loss is not finite")
    status = await generation(api, "rank", 2)
    assert await names(api, "rank") == {f"rank-w{worker}-0" for worker in range(4)}
    assert status["restarts"] == [{"cause": "RankFailure", "count": 1}]
    assert status["restartsTowardLimit"] == 1
    failed = [event["message"] for event in await api.posted("rank", "RankFailed")]
    assert failed == ["Worker 1: ValueError: loss is not finite"], "the root cause is told, not the peers' noise"


async def test_peers_that_break_first_do_not_turn_a_lost_pod_into_a_failure(
    api: Api,
    kubelet: Kubelet,
    start_operator: StartOperator,
    settled: Settled,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failure_detection, "PEER_LOST_WAIT_SECONDS", LEAST_SECONDS)
    await start_operator()
    await api.create(JOBS, job("noise"))
    await settled("noise")
    for agent in kubelet.of("noise")[:3]:
        await agent.fail(FailureKind.PEER_LOST, "connection reset by peer")
    await asyncio.sleep(0.5)
    await api.delete(f"{PODS}/noise-w3-0", grace=0)
    kubelet._end("noise-w3-0")
    status = await generation(api, "noise", 2)
    assert status["restarts"] == [{"cause": "PodLost", "count": 1}]
    assert status["restartsTowardLimit"] == 0


@pytest.mark.parametrize("kind", [FailureKind.REJECTED, FailureKind.INVALID_INPUT])
async def test_a_run_that_ranks_refuse_stalls_the_job(
    kind: FailureKind, api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    await start_operator()
    await api.create(JOBS, job("refused"))
    await settled("refused")
    await kubelet.of("refused")[2].fail(kind, "`training.fp8` needs another GPU")

    status = await stalled(api, "refused")
    reason = {FailureKind.REJECTED: "RunRejected"}.get(kind, kind.value)
    for kind_of_condition in ("Stalled", "Ready"):
        assert condition(status, kind_of_condition)["reason"] == reason
        assert condition(status, kind_of_condition)["message"].startswith("Worker 2: `training.fp8` needs another GPU.")
    assert status.get("restartCount", 0) == 0


async def test_ranks_that_fail_too_often_fail_the_job(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    await start_operator()
    await api.create(JOBS, job("often", recovery={"maxRestarts": 1}))
    await settled("often")
    await kubelet.of("often")[1].fail(FailureKind.ERROR, "boom")
    await generation(api, "often", 2)
    await kubelet.of("often")[1].fail(FailureKind.ERROR, "boom again")

    status = await failed(api, "often")
    assert condition(status, "Failed")["reason"] == "RestartLimitReached"
    assert "boom again" in condition(status, "Failed")["message"]
    assert condition(status, "Stalled")["status"] == "True"
    assert condition(status, "Reconciling")["status"] == "False"

    async def stopped() -> bool:
        return not kubelet.of("often")

    await until(stopped, "its pods go")


async def test_a_pod_that_crashes_counts_toward_the_limit(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    await start_operator()
    await api.create(JOBS, job("crash"))
    await settled("crash")
    await kubelet.crash("crash-w1-0", 137)
    status = await generation(api, "crash", 2)
    assert status["restarts"] == [{"cause": "PodFailed", "count": 1}]
    assert status["restartsTowardLimit"] == 1
    assert "crash-w1-1" in await names(api, "crash")


async def test_pods_that_exit_before_the_first_generation_fail_the_job(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    kubelet.silent = True
    await start_operator()
    await api.create(JOBS, job("exits", recovery={"maxRestarts": 0}))

    async def running() -> bool:
        return len(kubelet.of("exits")) == 4

    await until(running, "the pods run")
    await kubelet.crash("exits-w0-0", 1)

    async def failed() -> bool:
        return condition(await api.status("exits"), "Failed").get("reason") == "RestartLimitReached"

    await until(failed, "the job fails")


async def test_a_restarted_operator_changes_nothing(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    first = await start_operator()
    await api.create(JOBS, job("calm"))
    await settled("calm")
    before = await api.job("calm")
    for agent in kubelet.of("calm"):
        # Progress that the status does not tell yet would be a change.
        agent.steps_per_report, agent.step = 0, before["status"]["step"]
    pods = {pod["metadata"]["uid"] for pod in await api.pods("calm")}
    await first.stop()
    await start_operator(identity="second")
    await asyncio.sleep(2)
    after = await api.job("calm")
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
    assert {pod["metadata"]["uid"] for pod in await api.pods("calm")} == pods
    assert [len(agent.documents) for agent in kubelet.of("calm")] == [1, 1, 1, 1]


async def test_an_operator_that_dies_in_the_middle_of_a_recovery_finishes_it(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    first = await start_operator()
    await api.create(JOBS, job("middle"))
    await settled("middle")
    kubelet.hold = True
    await api.delete(f"{PODS}/middle-w3-0")

    async def replaced() -> bool:
        return "middle-w3-1" in await names(api, "middle")

    await until(replaced, "the new pod is made")
    await first.stop()
    kubelet.hold = False
    await asyncio.sleep(0.3)
    await start_operator(identity="second")
    status = await generation(api, "middle", 2)
    assert status["mesh"]["cause"] == "PodLost"
    assert status["restartCount"] == 1
    assert await names(api, "middle") == {"middle-w0-0", "middle-w1-0", "middle-w2-0", "middle-w3-1"}


async def test_a_document_lost_with_the_operator_is_served_again(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    first = await start_operator()
    await api.create(JOBS, job("again"))
    await settled("again")
    await first.stop()
    forgetful = kubelet.of("again")[2]
    original = forgetful.documents.pop()
    await start_operator(identity="second")

    async def served() -> bool:
        return bool(forgetful.documents)

    await until(served, "the document comes again")
    assert forgetful.documents == [original]
    assert (await api.status("again"))["mesh"]["generation"] == 1


async def test_a_leader_that_loses_the_lease_ends(api: Api, start_operator: StartOperator) -> None:
    operator = await start_operator(identity="one", lease_seconds=15.0)
    path = "/apis/coordination.k8s.io/v1/namespaces/default/leases/meshwright-operator"

    async def leads() -> bool:
        lease = await api.call("GET", path, ok=False)
        return bool((lease.get("spec") or {}).get("holderIdentity") == "one")

    await until(leads, "the operator leads")
    taken = {"holderIdentity": "thief", "leaseDurationSeconds": 60, "leaseTransitions": 7}
    await api.patch(path, {"spec": taken})

    async def ended() -> bool:
        return operator.failure is not None

    await until(ended, "the operator ends")
    assert "thief" in repr(operator.failure)


async def test_a_pod_that_loses_its_label_gets_it_back_and_is_not_replaced(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    await start_operator()
    await api.create(JOBS, job("train"))
    await settled("train")
    before = {pod["metadata"]["uid"] for pod in await api.pods("train")}
    await api.patch(f"{PODS}/train-w1-0", {"metadata": {"labels": {LABEL_JOB: None}}})

    async def labeled() -> bool:
        return {pod["metadata"]["uid"] for pod in await api.pods("train")} == before

    await until(labeled, "the pod carries its label again", 60)
    status = await settled("train")
    assert status["mesh"]["generation"] == 1
    assert {pod["metadata"]["uid"] for pod in await api.items(PODS)} == before
