"""Gangs against an API server: real refusals by quota and limits, and jobs that race for too few nodes over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.operator.agents import Kubelet
from tests.operator.conftest import Settled, StartOperator
from tests.operator.support import JOBS, PODS, Api, condition, job, until
from tests.operator.test_gang_races import small

NAMESPACE = "/api/v1/namespaces/default"


async def placed_is(api: Api, name: str, reason: str) -> dict[str, Any]:
    async def check() -> dict[str, Any] | None:
        found = condition(await api.status(name), "Placed")
        return found if found.get("reason") == reason else None

    found: dict[str, Any] = await until(check, f"{name} says {reason}", 20)
    return found


async def gone(api: Api, name: str) -> None:
    async def check() -> bool:
        return not await api.pods(name)

    await until(check, f"{name} holds no pod", 20)


async def enforced(api: Api, kind: str, body: dict[str, Any], probe: dict[str, Any]) -> None:
    """Creates the object; skips the test when the server lets a pod pass that it forbids."""
    await api.call("DELETE", f"{NAMESPACE}/{kind}/{body['metadata']['name']}", {}, ok=False)
    created = await api.call("POST", f"{NAMESPACE}/{kind}", body, ok=False)
    if created.get("code") == 404:
        pytest.skip(f"this server has no {kind}")
    if "status" in body:
        await api.patch(f"{NAMESPACE}/{kind}/{body['metadata']['name']}/status", {"status": body["status"]})

    async def refused() -> bool:
        answer = await api.call("POST", f"{PODS}?dryRun=All", probe, ok=False)
        return answer.get("code") == 403

    try:
        await until(refused, "it is enforced", 5)
    except AssertionError:
        await api.delete(f"{NAMESPACE}/{kind}/{body['metadata']['name']}")
        pytest.skip(f"this server enforces no {kind}")


def probe(resources: dict[str, Any], count: int = 1) -> dict[str, Any]:
    container = {"name": "c", "image": "x", "resources": resources}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "probe"},
        "spec": {"containers": [container] * count},
    }


async def test_a_quota_that_is_too_small_leaves_no_half_a_gang(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    hard = {"requests.nvidia.com/gpu": "6"}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": hard}}
    quota["status"] = {"hard": hard, "used": {"requests.nvidia.com/gpu": "0"}}
    limits = {"limits": {"nvidia.com/gpu": "8"}, "requests": {"nvidia.com/gpu": "8"}}
    await enforced(api, "resourcequotas", quota, probe(limits))
    try:
        await start_operator()
        await api.create(JOBS, job("eight"))
        found = await placed_is(api, "eight", "QuotaExceeded")
        assert "exceeded quota: few" in found["message"]
        assert condition(await api.status("eight"), "Ready")["reason"] == "QuotaExceeded"
        await gone(api, "eight")
        assert kubelet.ever == [], "nothing was started"
        more = {"requests.nvidia.com/gpu": "80"}
        await api.patch(f"{NAMESPACE}/resourcequotas/few", {"spec": {"hard": more}})
        await api.patch(f"{NAMESPACE}/resourcequotas/few/status", {"status": {"hard": more}})
        status = await settled("eight")
        assert status["mesh"].get("attempts", 0) == 0
        assert "GangReleased" in await api.reasons("eight") or "PlacementFailed" in await api.reasons("eight")
    finally:
        await api.delete(f"{NAMESPACE}/resourcequotas/few")


async def test_a_limit_range_is_told_and_nothing_is_held(
    api: Api, kubelet: Kubelet, start_operator: StartOperator
) -> None:
    limit = {"type": "Container", "max": {"memory": "1Gi"}}
    body = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "tiny"}, "spec": {"limits": [limit]}}
    await enforced(api, "limitranges", body, probe({"limits": {"memory": "2Gi"}}))
    try:
        await start_operator()
        workers = {"image": "meshwright/worker", "gpusPerWorker": 2, "resources": {"memory": "4Gi"}}
        await api.create(JOBS, job("wide", workers=workers))
        found = await placed_is(api, "wide", "PodsForbidden")
        assert "maximum memory usage per Container is 1Gi" in found["message"]
        await gone(api, "wide")
    finally:
        await api.delete(f"{NAMESPACE}/limitranges/tiny")


@pytest.mark.long
async def test_jobs_that_race_for_too_few_nodes_start_whole_and_both_complete(
    api: Api, kubelet: Kubelet, start_operator: StartOperator
) -> None:
    await start_operator()
    for pair, (one, other) in enumerate(((4, 3), (3, 2))):
        names = f"a{pair}", f"b{pair}"
        await asyncio.gather(*(api.create(JOBS, small(n, size)) for n, size in zip(names, (one, other), strict=True)))
        sizes = dict(zip(names, (one, other), strict=True))

        async def done(sizes: dict[str, int] = sizes) -> bool:
            complete = 0
            for name, size in sizes.items():
                pods = await api.pods(name)
                free = [pod for pod in pods if not pod["spec"].get("schedulingGates")]
                assert not free or len(pods) == size, f"{name} started with {len(pods)} of {size} pods"
                status = await api.status(name)
                if condition(status, "Ready").get("reason") == "Running":
                    for agent in kubelet.of(name):
                        await agent.finish()
                complete += condition(status, "Complete").get("status") == "True"
            return complete == len(sizes)

        await until(done, f"{names} complete", 60)
