"""Jobs in queues of Kueue under exactly the rights that the chart gives the operator with `queues.kueue.enabled`.

`test_pod_groups.py` says the same of PodGroups, and `test_kueue_controller.py` has Kueue's own controller.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from meshwright.api import labels
from meshwright.api.objects import KubeObject
from tests.operator import role_rules
from tests.operator.agents import Kubelet
from tests.operator.conftest import Settled, StartOperator
from tests.operator.proxy import Proxy
from tests.operator.support import JOBS, Api, condition, job, until, write_kubeconfig

GROUP = "kueue.x-k8s.io"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
WORKLOADS = f"/apis/{GROUP}/v1beta2/namespaces/default/workloads"
PRIORITIES = f"/apis/{GROUP}/v1beta2/workloadpriorityclasses"
FLAVORS = f"/apis/{GROUP}/v1beta2/resourceflavors"
OPTIONAL, EVERYWHERE = ("kueueRules",), ("kueueClusterRules",)
TIME = "2026-01-01T00:00:00Z"


def definition(kind: str, plural: str, scope: str) -> KubeObject:
    """A kind of Kueue that accepts any fields."""
    open_fields = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    properties = {"spec": open_fields, "status": open_fields, "value": {"type": "integer"}}
    version = {
        "name": "v1beta2",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": {"type": "object", "properties": properties}},
        "subresources": {"status": {}},
    }
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{GROUP}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, a test's"},
        },
        "spec": {"group": GROUP, "scope": scope, "names": names, "versions": [version]},
    }


async def admit_everything(api: Api) -> None:
    """Does what Kueue does with a queue in which everything fits."""
    while True:
        for found in await api.items(WORKLOADS):
            if not condition(found.get("status") or {}, "Admitted"):
                yes = [{"type": kind, "status": "True", "reason": kind} for kind in ("QuotaReserved", "Admitted")]
                pods = found["spec"]["podSets"][0]
                given = {"name": pods["name"], "count": pods["count"], "flavors": {"nvidia.com/gpu": "default"}}
                status = {
                    "conditions": [{**one, "message": "", "lastTransitionTime": TIME} for one in yes],
                    "admission": {"clusterQueue": "team", "podSetAssignments": [given]},
                }
                path = f"{WORKLOADS}/{found['metadata']['name']}"
                merge = "application/merge-patch+json"
                await api.call("PATCH", f"{path}/status", {"status": status}, kind=merge, ok=False)
        await asyncio.sleep(0.2)


@pytest_asyncio.fixture
async def queues(api: Api) -> AsyncIterator[Api]:
    """A server with the kinds of Kueue, and the operator's rights."""
    await api.call("POST", CRDS, definition("Workload", "workloads", "Namespaced"), ok=False)
    await api.call("POST", CRDS, definition("ResourceFlavor", "resourceflavors", "Cluster"), ok=False)
    await api.call("POST", CRDS, definition("WorkloadPriorityClass", "workloadpriorityclasses", "Cluster"), ok=False)
    await until(lambda: _served(api), "Kueue's kinds are served")
    for path, body in role_rules.objects(optional=OPTIONAL, everywhere=EVERYWHERE):
        await api.call("DELETE", f"{path}/{body['metadata']['name']}", {}, ok=False)
        await api.call("POST", path, body, ok=False)
    for left in await api.items(WORKLOADS):
        await api.delete(f"{WORKLOADS}/{left['metadata']['name']}")
    version = {"apiVersion": f"{GROUP}/v1beta2"}
    low = {**version, "kind": "WorkloadPriorityClass", "metadata": {"name": "low"}, "value": 1}
    await api.call("POST", PRIORITIES, low, ok=False)
    flavor = {**version, "kind": "ResourceFlavor", "metadata": {"name": "default"}, "spec": {}}
    await api.call("POST", FLAVORS, flavor, ok=False)
    kueue = asyncio.create_task(admit_everything(api))
    yield api
    kueue.cancel()
    await asyncio.gather(kueue, return_exceptions=True)


async def _served(api: Api) -> bool:
    try:
        return all(["items" in await api.call("GET", path, ok=False) for path in (WORKLOADS, PRIORITIES, FLAVORS)])
    except Exception:  # noqa: BLE001 - until then a real server answers in plain text
        return False


def queued(name: str, more: dict[str, str] | None = None, **spec: object) -> KubeObject:
    body = job(name, **spec)
    body["metadata"]["labels"] = {labels.KUEUE_QUEUE: "team", **(more or {})}
    return body


async def workload(api: Api, name: str) -> KubeObject:
    owned = [one for one in await api.items(WORKLOADS) if one["metadata"]["ownerReferences"][0]["name"] == name]
    return owned[0] if owned else {}


@pytest.mark.slow
async def test_queues_of_kueue_use_exactly_the_rights_of_the_chart(
    queues: Api,
    kubelet: Kubelet,
    start_operator: StartOperator,
    settled: Settled,
    session: aiohttp.ClientSession,
    tmp_path: Path,
) -> None:
    path, body = role_rules.token_request()
    token = (await queues.create(path, body))["status"]["token"]
    async with Proxy(queues.url, session).serving() as proxy:
        operator = await start_operator(kubeconfig=write_kubeconfig(tmp_path / "behind", proxy.url, token))
        await _life_in_a_queue(queues, kubelet, settled)
        await operator.stop()
    used = {right for request in proxy.requests if (right := request.right) is not None}
    beyond = role_rules.rights((*OPTIONAL, *EVERYWHERE)) - role_rules.rights()
    assert {right for right in used if right[0] in (GROUP, "scheduling.k8s.io")} == beyond


async def _life_in_a_queue(api: Api, kubelet: Kubelet, settled: Settled) -> None:
    """Jobs that make the operator use each right."""
    await api.create(JOBS, queued("queued", {labels.KUEUE_PRIORITY: "low"}))
    await settled("queued")
    first = await workload(api, "queued")
    assert first["spec"]["priority"] == 1
    await api.create(JOBS, queued("sent", {labels.KUEUE_PREBUILT: "elsewhere"}))
    await api.create(JOBS, queued("classed", priorityClassName="important"))

    async def waits() -> bool:
        return "Waiting for Workload" in str(condition(await api.status("sent"), "Ready").get("message"))

    await until(waits, "a job from another cluster waits for the Workload that comes with it", 60)
    await until(lambda: workload(api, "classed"), "the class of the pods is looked up", 60)
    for name in ("sent", "classed"):
        await api.delete(f"{JOBS}/{name}")
    await _edit(api, first["metadata"]["uid"])
    await settled("queued")
    for agent in kubelet.of("queued"):
        await agent.finish()

    async def finished() -> bool:
        return condition((await workload(api, "queued"))["status"], "Finished").get("reason") == "Succeeded"

    await until(finished, "its Workload is finished", 60)


async def _edit(api: Api, first: str) -> None:
    """Suspends and resumes the job, and makes it smaller: then it asks for another quota."""

    async def is_active(wanted: bool) -> bool:
        return (await workload(api, "queued")).get("spec", {}).get("active", True) is wanted

    await api.patch(f"{JOBS}/queued", {"spec": {"suspend": True}})
    await until(lambda: is_active(False), "its Workload is not active", 60)
    await api.patch(f"{JOBS}/queued", {"spec": {"suspend": False, "replicas": 1}})

    async def renewed() -> bool:
        found = await workload(api, "queued")
        return bool(found) and found["metadata"]["uid"] != first

    await until(renewed, "it has another Workload", 60)
