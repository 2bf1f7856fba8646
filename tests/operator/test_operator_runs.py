"""The whole operator against an API server, with agents that speak the real protocol: a job's ordinary life."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from meshwright.protocol.messages import Evaluation
from tests.operator.agents import Kubelet
from tests.operator.conftest import Settled, StartOperator
from tests.operator.support import JOBS, Api, condition, job, node, put_node, until


async def reached(api: Api, name: str, kind: str, reason: str | None = None) -> dict[str, Any]:
    async def check() -> dict[str, Any] | None:
        status = await api.status(name)
        found = condition(status, kind)
        return status if found.get("status") == "True" and reason in (None, found["reason"]) else None

    status: dict[str, Any] = await until(check, f"{name} is {kind}")
    return status


async def test_a_job_starts_as_a_gang_and_completes(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    kubelet.hold = True
    await start_operator()
    created = await api.create(JOBS, job("whole"))

    async def ungated() -> list[dict[str, Any]] | None:
        pods = await api.pods("whole")
        gated = [pod for pod in pods if pod["spec"].get("schedulingGates")]
        assert len(pods) == 4 or len(gated) == len(pods), "a gate came off before the gang was whole"
        return pods if len(pods) == 4 and not gated else None

    pods = await until(ungated, "all gates are off")
    assert {pod["metadata"]["name"] for pod in pods} == {f"whole-w{worker}-0" for worker in range(4)}
    for pod in pods:
        owner = pod["metadata"]["ownerReferences"][0]
        assert (owner["uid"], owner["controller"]) == (created["metadata"]["uid"], True)
    kubelet.hold = False

    status = await settled("whole")
    assert (status["readyRanks"], status["mesh"]["generation"], status["mesh"]["cause"]) == ("8/8", 1, "Start")
    assert status["plan"]["summary"] == "TP 2 x PP 2 x DP 2"
    document = kubelet.of("whole")[0].documents[0]
    assert document.master_port == 20000
    assert [(m.worker, m.first_rank, m.ranks) for m in document.members] == [(0, 0, 2), (1, 2, 2), (2, 4, 2), (3, 6, 2)]
    assert {m.address for m in document.members} == {agent.address for agent in kubelet.of("whole")}

    for agent in kubelet.of("whole"):
        agent.evaluation = Evaluation(step=50, loss=1.5)
        await agent.finish()
    status = await reached(api, "whole", "Complete")
    assert status["evaluation"] == {"step": 50, "loss": "1.5", "perplexity": "4.48169"}
    assert condition(status, "Ready")["status"] == "True"
    assert condition(status, "Reconciling")["status"] == condition(status, "Stalled")["status"] == "False"
    assert status["completionTime"]
    assert status["restartCount"] == 0

    async def told() -> bool:
        return {"Placed", "GangStarted", "MeshFormed", "Started", "Completed"} <= set(await api.reasons("whole"))

    await until(told, "the events are there")


async def test_a_job_whose_ranks_share_sequences_is_planned_and_told_so(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    await start_operator()
    await api.create(JOBS, job("shared", parallelism={"tensor": 2, "pipeline": 1, "context": 2, "microBatches": 2}))
    status = await settled("shared")
    assert (status["plan"]["context"], status["plan"]["worldSize"], status["readyRanks"]) == (2, 8, "8/8")
    assert status["plan"]["summary"] == "TP 2 x CP 2 x PP 1 x DP 2"
    run = kubelet.of("shared")[0].documents[0].run
    assert (run.context, run.layout.world_size, run.parallelism.context_method) == (2, 8, "RingZigZag")


async def test_suspend_gives_pods_back_and_resume_goes_on(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    await start_operator()
    await api.create(JOBS, job("nap"))
    await settled("nap")
    await api.patch(f"{JOBS}/nap", {"spec": {"suspend": True}})
    status = await reached(api, "nap", "Suspended")
    assert await api.pods("nap") == []
    assert condition(status, "Ready")["status"] == "True"
    assert status["readyRanks"] == "0/8"
    assert status["checkpoint"]["step"] >= 0, "the checkpoint of the drain was lost"
    assert "activeSince" not in status

    await api.patch(f"{JOBS}/nap", {"spec": {"suspend": False}})
    status = await settled("nap")
    assert (status["mesh"]["generation"], status["mesh"]["cause"]) == (2, "Resume")
    assert status["restartCount"] == 0
    assert {pod["metadata"]["name"] for pod in await api.pods("nap")} == {f"nap-w{worker}-1" for worker in range(4)}


async def test_a_job_waits_for_room_without_holding_pods(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    await start_operator()
    await api.create(JOBS, job("first"))
    await settled("first")
    await api.create(JOBS, job("second"))

    async def refused() -> dict[str, Any] | None:
        status = await api.status("second")
        return status if condition(status, "Placed").get("status") == "False" else None

    status = await until(refused, "there is no room")
    assert "8 GPUs missing" in condition(status, "Placed")["message"]
    assert condition(status, "Reconciling")["status"] == "True"
    assert condition(status, "Stalled")["status"] == "False"
    assert await api.pods("second") == []

    for name in ("n4", "n5", "n6", "n7"):
        await put_node(api, node(name, "r2"))
    status = await settled("second")
    assert {entry["node"] for entry in status["placement"]["workers"]} == {"n4", "n5", "n6", "n7"}
    assert len(await api.posted("second", "PlacementFailed")) == 1
    for name in ("n4", "n5", "n6", "n7"):
        await api.delete(f"/api/v1/nodes/{name}")


async def test_a_spec_that_cannot_be_planned_is_stalled_and_harms_nobody(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    await start_operator()
    await api.create(JOBS, job("unknown", model={"preset": "no-such-model"}))
    status = await reached(api, "unknown", "Stalled", "InvalidSpec")
    assert "no-such-model" in condition(status, "Ready")["message"]
    assert {c["type"] for c in status["conditions"]} >= {"Ready", "Reconciling", "Placed", "Complete", "Failed"}
    assert condition(status, "Reconciling")["status"] == "False"
    await api.create(JOBS, job("fine"))
    await settled("fine")


async def test_a_damaged_status_costs_nobody_a_generation(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    operator = await start_operator()
    await api.create(JOBS, job("damaged"))
    await settled("damaged")
    await operator.stop()
    broken = {"status": {"mesh": None, "placement": None, "conditions": None, "readyRanks": "many"}}
    await api.patch(f"{JOBS}/damaged/status", broken)
    await start_operator(identity="second")
    status = await settled("damaged")
    assert status["mesh"]["generation"] > 1, "an old generation must not be announced again"
    assert {pod["metadata"]["name"] for pod in await api.pods("damaged")} == {f"damaged-w{w}-0" for w in range(4)}


async def test_an_edit_of_the_spec_restarts_the_workers(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    await start_operator()
    await api.create(JOBS, job("edited"))
    await settled("edited")
    await api.patch(f"{JOBS}/edited", {"spec": {"replicas": 1}})

    async def smaller() -> dict[str, Any] | None:
        status = await api.status("edited")
        return status if status.get("readyRanks") == "4/4" else None

    status = await until(smaller, "it runs with one replica")
    assert status["mesh"]["cause"] == "SpecChanged"
    assert status["plan"]["summary"] == "TP 2 x PP 2 x DP 1"
    assert {pod["metadata"]["name"] for pod in await api.pods("edited")} == {"edited-w0-1", "edited-w1-1"}
    assert status["restartsTowardLimit"] == 0


async def test_deadline_fails_the_job_and_ttl_deletes_it(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    await start_operator()
    await api.create(JOBS, job("late", activeDeadlineSeconds=6, ttlSecondsAfterFinished=8))
    await settled("late")
    status = await reached(api, "late", "Failed", "DeadlineExceeded")
    assert condition(status, "Stalled")["status"] == "True"

    async def deleted() -> bool:
        return "spec" not in await api.call("GET", f"{JOBS}/late", ok=False)

    await until(deleted, "it is deleted after its time", 40)


async def test_steady_state_writes_nothing(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    await start_operator(resync_seconds=1.0)
    await api.create(JOBS, job("steady"))
    await settled("steady")
    for agent in kubelet.of("steady"):
        agent.steps_per_report = 0
    await asyncio.sleep(0.5)
    before = (await api.job("steady"))["metadata"]["resourceVersion"]
    await asyncio.sleep(3)
    assert (await api.job("steady"))["metadata"]["resourceVersion"] == before


async def test_metrics_and_health_are_served(
    api: Api,
    kubelet: Kubelet,
    start_operator: StartOperator,
    settled: Settled,
    session: aiohttp.ClientSession,
    metrics_port: int,
) -> None:
    from meshwright_operator.settings import Address

    await start_operator(metrics_listen=Address("127.0.0.1", metrics_port))
    await api.create(JOBS, job("seen"))
    await settled("seen")
    base = f"http://127.0.0.1:{metrics_port}"
    for path in ("healthz", "readyz"):
        async with session.get(f"{base}/{path}") as response:
            assert response.status == 200
    async with session.get(f"{base}/metrics") as response:
        text = await response.text()
    assert 'ptj_job_ranks{job_name="seen",namespace="default",state="training"} 8.0' in text
    assert 'ptj_job_status_condition{job_name="seen",namespace="default",status="True",type="Ready"} 1.0' in text
    assert "ptj_leader 1.0" in text
    assert 'ptj_pod_operations_total{operation="create"} 4.0' in text
    uid = (await api.job("seen"))["metadata"]["uid"]
    await api.delete(f"{JOBS}/seen")

    async def gone() -> bool:
        async with session.get(f"{base}/metrics") as response:
            return uid not in await response.text()

    await until(gone, "the series go with the job")
