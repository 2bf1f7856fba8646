"""A job that is being deleted, in whatever state it is, loses its pods and gets nothing more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.operator.agents import Kubelet
from tests.operator.conftest import StartOperator
from tests.operator.support import JOBS, Api, condition, job, until
from tests.tiers import mostly_long

HOLD = {"finalizers": ["example.com/hold"]}


async def reached(api: Api, kubelet: Kubelet, state: str) -> None:
    """Brings the job `going` into a state."""
    spec: dict[str, Any] = {"suspend": True} if state == "suspended" else {}
    if state == "failed":
        spec = {"recovery": {"maxRestarts": 0}}
    if state == "waiting for room":
        spec = {"replicas": 4}
    if state == "stalled":
        spec = {"model": {"preset": "no-such-model"}}
    kubelet.hold = state == "starting"
    kubelet.silent = state == "gathering"
    body = job("going", **spec)
    await api.create(JOBS, {**body, "metadata": {**body["metadata"], **HOLD}})
    if state in ("training", "failed"):
        await until(lambda: holds(api, "Ready"), "it trains", 25)
    if state == "failed":
        await kubelet.crash("going-w0-0")
        await until(lambda: holds(api, "Failed"), "it has failed", 25)
    if state in ("starting", "gathering"):
        await until(lambda: pods(api, 4), "it has pods", 60)
    if state == "gathering":
        await until(lambda: started(kubelet, 4), "its pods run", 60)
    if state == "suspended":
        await until(lambda: holds(api, "Suspended"), "it is suspended")
    if state in ("stalled", "waiting for room"):
        await until(lambda: seen(api), "it is seen")


async def holds(api: Api, kind: str) -> bool:
    return condition(await api.status("going"), kind).get("status") == "True"


async def pods(api: Api, count: int) -> bool:
    return len(await api.pods("going")) == count


async def started(kubelet: Kubelet, count: int) -> bool:
    return len(kubelet.agents) == count


async def seen(api: Api) -> bool:
    return (await api.status("going")).get("observedGeneration") == 1


async def says_so(api: Api) -> bool:
    ready = condition(await api.status("going"), "Ready")
    return ready.get("reason") == "Terminating" and "example.com/hold" in ready["message"]


STATES = ["starting", "gathering", "training", "failed", "suspended", "stalled", "waiting for room"]
OFTEN = {"training", "failed"}


@pytest.mark.parametrize("state", mostly_long(STATES, OFTEN.__contains__))
async def test_a_job_that_is_being_deleted_gets_nothing_more(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, state: str
) -> None:
    await start_operator(resync_seconds=1.0)
    await reached(api, kubelet, state)
    await api.delete(f"{JOBS}/going")
    await until(lambda: pods(api, 0), "its pods are gone", 60)
    await until(lambda: says_so(api), "its state says so", 60)
    before = await api.job("going")
    assert before["metadata"]["deletionTimestamp"]
    await asyncio.sleep(2.5)
    after = await api.job("going")
    assert await api.pods("going") == []
    assert after["status"] == before["status"]
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
    await api.patch(f"{JOBS}/going", {"metadata": {"finalizers": None}})

    async def gone() -> bool:
        return "spec" not in await api.call("GET", f"{JOBS}/going", ok=False)

    await until(gone, "it is gone")


async def test_a_job_whose_namespace_is_being_deleted_raises_no_alarm_when_its_pods_go_first(
    api: Api, kubelet: Kubelet, start_operator: StartOperator
) -> None:
    """The namespace controller deletes one kind of object after the other. An API server with many takes minutes."""
    name = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "doomed"}}
    await api.create("/api/v1/namespaces", name)
    jobs, pods_of = JOBS.replace("/default/", "/doomed/"), "/api/v1/namespaces/doomed/pods"
    await start_operator()
    body = job("ends")
    await api.create(jobs, {**body, "metadata": {**body["metadata"], "namespace": "doomed"}})

    async def all_pods() -> bool:
        return len(await api.items(pods_of)) == 4

    async def refused() -> list[dict[str, Any]]:
        status = (await api.get(f"{jobs}/ends"))["status"]
        found = [condition(status, kind) for kind in ("Placed", "Stalled")]
        return found if found[0].get("reason") == "NamespaceTerminating" else []

    await until(all_pods, "its pods are created", 60)
    await api.delete("/api/v1/namespaces/doomed")
    for pod in await api.items(pods_of):
        await api.delete(f"{pods_of}/{pod['metadata']['name']}", grace=0)
    placed, stalled = await until(refused, "the API server refuses what replaces them", 60)
    assert "because it is being terminated" in placed["message"]
    assert stalled["status"] == "False"
    assert await api.items(pods_of) == []
    await api.delete(f"{jobs}/ends")

    async def gone() -> bool:
        return "spec" not in await api.call("GET", f"{jobs}/ends", ok=False)

    await until(gone, "no operator of another test finds the job", 60)
