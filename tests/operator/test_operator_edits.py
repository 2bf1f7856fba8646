"""Edits of jobs that run: which restart the gang, which wait, which are refused, and that none of them kills it."""

from __future__ import annotations

from typing import Any

from tests.operator.agents import Kubelet
from tests.operator.conftest import Settled, StartOperator
from tests.operator.support import JOBS, MERGE, Api, condition, job, node, put_node, until

PRESET: dict[str, Any] = {
    "model": {"preset": "llama-3-8b"},
    "training": {"steps": 50, "globalBatchSize": 8, "sequenceLength": 66, "seed": 1},
    "data": {"source": "PythonStdlib"},
    "parallelism": {"tensor": 2, "pipeline": 2, "microBatches": 2},
}


async def says(api: Api, name: str, kind: str, value: str, reason: str) -> dict[str, Any]:
    async def check() -> dict[str, Any] | None:
        status = await api.status(name)
        found = condition(status, kind)
        return status if (found.get("status"), found.get("reason")) == (value, reason) else None

    status: dict[str, Any] = await until(check, f"{name} has {kind}={value} ({reason})", 25)
    return status


async def names(api: Api, name: str) -> set[str]:
    return {pod["metadata"]["name"] for pod in await api.pods(name)}


async def test_an_edit_that_cannot_be_planned_stops_nobody_and_the_gang_still_recovers(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    operator = await start_operator()
    await api.create(JOBS, job("careful", **PRESET))
    await settled("careful")
    edit = {"parallelism": {"tensor": 3}, "workers": {"gpusPerWorker": 3, "image": "meshwright/worker:2"}}
    await api.patch(f"{JOBS}/careful", {"spec": edit})
    status = await says(api, "careful", "Stalled", "True", "InvalidSpec")
    message = condition(status, "Ready")["message"]
    assert "spec.parallelism.tensor: must divide `model.heads`" in message
    assert "keeps running: 8 ranks are training in generation 1" in message
    assert condition(status, "Ready")["status"] == condition(status, "Reconciling")["status"] == "False"
    assert status["observedGeneration"] == (await api.job("careful"))["metadata"]["generation"]
    assert (status["readyRanks"], status["mesh"]["generation"]) == ("8/8", 1)

    await operator.stop()
    await start_operator(identity="second")
    await api.delete("/api/v1/namespaces/default/pods/careful-w1-0")

    async def recovered() -> dict[str, Any] | None:
        status = await api.status("careful")
        return status if status["mesh"]["generation"] == 2 and status["readyRanks"] == "8/8" else None

    status = await until(recovered, "the lost pod was made again", 25)
    assert condition(status, "Stalled")["reason"] == "InvalidSpec"
    pods = {pod["metadata"]["name"]: pod for pod in await api.pods("careful")}
    assert set(pods) == {"careful-w0-0", "careful-w1-1", "careful-w2-0", "careful-w3-0"}
    assert {pod["spec"]["containers"][0]["image"] for pod in pods.values()} == {"meshwright/worker"}
    assert len(await api.posted("careful", "InvalidSpec")) == 1

    await api.patch(f"{JOBS}/careful", {"spec": {"parallelism": {"tensor": 2}, "workers": job("x")["spec"]["workers"]}})
    status = await settled("careful")
    assert status["mesh"]["generation"] == 2, "the spec is what runs: nobody was restarted"
    assert set(pods) == await names(api, "careful")


async def test_an_edit_without_room_waits_while_the_gang_trains(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    await start_operator()
    await api.create(JOBS, job("grow"))
    await settled("grow")
    await api.patch(f"{JOBS}/grow", {"spec": {"replicas": 4}})
    status = await says(api, "grow", "Reconciling", "True", "EditDoesNotFit")
    message = condition(status, "Ready")["message"]
    assert "of 8 workers with 2 GPUs" in message
    assert "8 GPUs missing" in message
    assert condition(status, "Stalled")["status"] == "False"
    assert (status["readyRanks"], status["plan"]["summary"]) == ("8/8", "TP 2 x PP 2 x DP 2")
    assert await names(api, "grow") == {f"grow-w{worker}-0" for worker in range(4)}
    assert len(await api.posted("grow", "EditDoesNotFit")) == 1

    for number in range(4, 8):
        await put_node(api, node(f"n{number}", "r2"))

    async def grown() -> dict[str, Any] | None:
        status = await api.status("grow")
        return status if status.get("readyRanks") == "16/16" else None

    status = await until(grown, "the edit is in effect", 40)
    assert (status["mesh"]["cause"], status["restartsTowardLimit"]) == ("SpecChanged", 0)
    assert condition(status, "Ready")["status"] == "True"
    for number in range(4, 8):
        await api.delete(f"/api/v1/nodes/n{number}")


async def test_a_new_image_needs_only_the_gangs_own_room(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    await start_operator()
    await api.create(JOBS, job("image"))
    await settled("image")
    await api.create(JOBS, job("behind"))
    await says(api, "behind", "Placed", "False", "DoesNotFit")
    await api.patch(f"{JOBS}/image", {"spec": {"workers": {"image": "meshwright/worker:2"}}})

    async def renewed() -> dict[str, Any] | None:
        status = await api.status("image")
        return status if status["mesh"]["generation"] == 2 and status["readyRanks"] == "8/8" else None

    status = await until(renewed, "it runs the new image, before the job that waits", 25)
    assert status["mesh"]["cause"] == "SpecChanged"
    images = {pod["spec"]["containers"][0]["image"] for pod in await api.pods("image")}
    assert images == {"meshwright/worker:2"}
    assert await names(api, "behind") == set()


async def test_edits_that_take_effect_at_once_or_later_restart_nobody(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    await start_operator()
    claims = "/api/v1/namespaces/default/persistentvolumeclaims"
    resources = {"requests": {"storage": "1Gi"}}
    await api.create(
        claims, {"metadata": {"name": "c"}, "spec": {"accessModes": ["ReadWriteMany"], "resources": resources}}
    )
    await api.create(JOBS, job("live", checkpoint={"claimName": "c"}))
    before = await settled("live")
    edit = {
        "ttlSecondsAfterFinished": 600,
        "activeDeadlineSeconds": 6000,
        "recovery": {"maxRestarts": 3, "exitCodes": [{"values": [3], "action": "FailJob"}]},
        "checkpoint": {"everySteps": 7, "keep": 3},
        "priority": 5,
    }
    await api.patch(f"{JOBS}/live", {"spec": edit})

    async def seen() -> dict[str, Any] | None:
        status = await api.status("live")
        return status if status["observedGeneration"] == 2 else None

    status = await until(seen, "the edit is seen")
    assert condition(status, "Ready")["status"] == "True"
    assert status["mesh"] == before["mesh"]
    assert await names(api, "live") == {f"live-w{worker}-0" for worker in range(4)}
    await api.delete("/api/v1/namespaces/default/pods/live-w0-0")

    async def recovered() -> bool:
        persisted = (await api.status("live"))["mesh"]["generation"] == 2
        return persisted and bool(kubelet.of("live")) and kubelet.of("live")[-1].generation == 2

    await until(recovered, "the next generation starts", 25)
    checkpoint = kubelet.of("live")[-1].documents[-1].run.checkpoint
    assert checkpoint is not None
    assert (checkpoint.every_steps, checkpoint.keep) == (7, 3)


async def test_what_may_not_be_edited_is_refused_with_its_field(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    async def refused(edit: dict[str, Any]) -> list[str]:
        answer = await api.call("PATCH", f"{JOBS}/fixed", {"spec": edit}, kind=MERGE, ok=False)
        assert answer["code"] == 422, answer
        return [cause["field"] for cause in answer["details"]["causes"]]

    edits: dict[str, dict[str, Any]] = {
        "spec.model": {"model": {"layers": 8}},
        "spec.data": {"data": {"source": "Files", "claimName": "c"}},
        "spec.training": {"training": {"seed": 9}},
    }
    await start_operator()
    await api.create(JOBS, job("fixed"))
    assert await refused({"managedBy": "example.com/other"}) == ["spec.managedBy"]
    for field, edit in edits.items():
        allowed = await api.call("PATCH", f"{JOBS}/fixed?dryRun=All", {"spec": edit}, kind=MERGE)
        assert allowed["kind"] == "ParallelTrainingJob", f"before the first step {field} may still be put right"
    await settled("fixed")

    async def trained() -> bool:
        return (await api.status("fixed")).get("step", 0) > 0

    await until(trained, "a step is finished", 60)
    assert {field: await refused(edit) for field, edit in edits.items()} == {field: [field] for field in edits}


async def test_the_job_of_another_manager_is_left_alone(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    await start_operator(resync_seconds=1.0)
    await api.create(JOBS, job("foreign", managedBy="kueue.x-k8s.io/multikueue"))
    await api.create(JOBS, job("own", managedBy="meshwright.dev/operator"))
    await settled("own")
    assert await api.status("foreign") == {"observedGeneration": -1}
    assert await names(api, "foreign") == set()
    assert await api.events("foreign") == []


async def test_a_job_made_again_under_its_name_takes_nothing_over(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    await start_operator()
    await api.create(JOBS, job("again"))
    first = await settled("again")
    old = {pod["metadata"]["uid"] for pod in await api.pods("again")}
    await api.delete(f"{JOBS}/again")
    await api.create(JOBS, job("again"))

    await says(api, "again", "Ready", "False", "WaitingForOldPods")
    status = await api.status("again")
    assert status.get("mesh", {}).get("generation", 0) == 0, "the old job's agents are none of the new one's"
    for name in await names(api, "again"):
        await api.delete(f"/api/v1/namespaces/default/pods/{name}")
    await until(lambda: gone(api, old), "the old job's pods are gone")
    kubelet.ever.clear()
    status = await until_running(api, "again")
    assert status["mesh"]["generation"] == 1
    assert status["startTime"] >= first["startTime"]
    assert not old & {pod["metadata"]["uid"] for pod in await api.pods("again")}


async def gone(api: Api, uids: set[str]) -> bool:
    return not uids & {pod["metadata"]["uid"] for pod in await api.pods("again")}


async def until_running(api: Api, name: str) -> dict[str, Any]:
    return await says(api, name, "Ready", "True", "Running")


async def test_a_finished_job_stays_finished_whatever_becomes_of_its_spec(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    await start_operator()
    await api.create(JOBS, job("over", **PRESET))
    await settled("over")
    for agent in kubelet.of("over"):
        await agent.finish()
    await says(api, "over", "Complete", "True", "Completed")
    await api.patch(f"{JOBS}/over", {"spec": {"parallelism": {"tensor": 3}, "workers": {"gpusPerWorker": 3}}})

    async def seen() -> dict[str, Any] | None:
        status = await api.status("over")
        return status if status["observedGeneration"] == 2 else None

    status = await until(seen, "the edit is seen")
    assert condition(status, "Ready")["status"] == condition(status, "Complete")["status"] == "True"
    assert condition(status, "Stalled")["status"] == "False"
    assert {c["observedGeneration"] for c in status["conditions"]} == {2}


async def test_a_suspended_job_is_settled_even_where_no_node_could_run_it(
    api: Api, kubelet: Kubelet, start_operator: StartOperator
) -> None:
    await start_operator()
    wide = {"workers": {"image": "w", "gpusPerWorker": 8}, "suspend": True}
    await api.create(JOBS, job("asleep", **wide))
    status = await says(api, "asleep", "Ready", "True", "Suspended")
    assert condition(status, "Suspended")["status"] == "True"
    await api.patch(f"{JOBS}/asleep", {"spec": {"suspend": False}})
    status = await says(api, "asleep", "Reconciling", "True", "Placing")
    assert condition(status, "Suspended")["status"] == "False"
