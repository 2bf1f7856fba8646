"""Disruption budgets: what a drain may evict."""

import pytest
import pytest_asyncio

from meshwright_local.kube.client import ApiError
from meshwright_local.kube.resources import BUDGETS, DEPLOYMENTS, PODS
from tests.local.test_deployments import deployment, pods_of, settled

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def counted(kit, name, **expected):
    """The status of a budget once it has these numbers."""

    async def look():
        found = (await kit.client.get(BUDGETS, name, "default")).get("status") or {}
        return found if {key: found.get(key) for key in expected} == expected else None

    return await kit.until(look, 20.0, f"the budget counts {expected}")


async def evict(kit, pod):
    name = pod["metadata"]["name"]
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": "default"}}
    await kit.client.request("POST", PODS.path("default", name, "eviction"), body=body)


@pytest_asyncio.fixture(loop_scope="module")
async def budget(kit):
    """Two ready pods of a deployment, one of which may be missing."""
    await kit.client.create(DEPLOYMENTS, deployment("guarded"), "default")
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "guarded"}}}
    await kit.client.create(BUDGETS, {"metadata": {"name": "guarded"}, "spec": spec}, "default")
    await settled(kit, "guarded")
    yield "guarded"
    await kit.client.delete(BUDGETS, "guarded", "default")
    await kit.client.delete(DEPLOYMENTS, "guarded", "default")


async def test_a_drain_takes_one_pod_after_the_other(kit, budget):
    status = await counted(kit, budget, expectedPods=2, desiredHealthy=1, currentHealthy=2, disruptionsAllowed=1)
    assert [(item["type"], item["status"]) for item in status["conditions"]] == [("DisruptionAllowed", "True")]
    first, second = await pods_of(kit, budget)
    await evict(kit, first)
    with pytest.raises(ApiError) as refused:
        await evict(kit, second)
    assert refused.value.status == 429
    # The replacement makes room for the next one.
    await counted(kit, budget, expectedPods=2, currentHealthy=2, disruptionsAllowed=1)
    assert first["metadata"]["name"] not in {pod["metadata"]["name"] for pod in await pods_of(kit, budget)}
    await evict(kit, second)


async def test_pods_without_a_controller(kit):
    """Only a number that must remain counts them. Nothing is allowed beyond it."""
    await kit.pod("lonely", "sleep 60", meta={"labels": {"app": "lonely"}})
    await kit.running("lonely")
    spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": "lonely"}}}
    await kit.client.create(BUDGETS, {"metadata": {"name": "lonely"}, "spec": spec}, "default")
    await counted(kit, "lonely", expectedPods=1, currentHealthy=1, desiredHealthy=1, disruptionsAllowed=0)
    with pytest.raises(ApiError) as refused:
        await evict(kit, await kit.client.get(PODS, "lonely", "default"))
    assert refused.value.status == 429
    await kit.client.delete(BUDGETS, "lonely", "default")
    await kit.delete("lonely", grace_seconds=0)
