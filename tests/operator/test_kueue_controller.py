"""Jobs in queues of Kueue's own controller on a real API server: `KUEUE`, `KUEUE_CONFIG` and `--cluster assets`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from meshwright.api.objects import KubeObject
from tests.operator import role_rules
from tests.operator.agents import Kubelet
from tests.operator.conftest import Settled, StartOperator
from tests.operator.kueue_server import (
    GROUP,
    WORKLOADS,
    cluster_queue,
    flavor,
    given,
    kueue,
    local_queue,
    topology,
    uninstall,
)
from tests.operator.support import JOBS, Api, condition, job, node, put_node, until, write_kubeconfig

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(given() is None, reason="needs KUEUE and KUEUE_CONFIG, a build of Kueue"),
]

WAIT_SECONDS = float(os.environ.get("KUEUE_WAIT_SECONDS", "20"))
"""How long a job waits for its quota."""
CLAIM = {"claimName": "checkpoints"}
PROFILES = """
daemon:
  namespaces: [default]
  sidecars: [{name: daemon, image: daemon:1, cpu: "2", memory: 1Gi}]
"""
RACK, HOST = "example.com/rack", "kubernetes.io/hostname"


@pytest_asyncio.fixture
async def queues(api: Api, real_server: str, tmp_path: Path) -> AsyncIterator[Api]:
    """Kueue, and eight nodes of two GPUs in four racks."""
    if not real_server:
        pytest.skip("Kueue needs a real API server: --cluster assets")
    found = given()
    assert found is not None
    for number in range(8):
        body = node(f"n{number}", f"r{number // 2}")
        body["metadata"]["labels"] |= {RACK: f"rack{number // 2}", "pool": "a" if number < 4 else "b"}
        await put_node(api, body)
        await api.patch(f"/api/v1/nodes/n{number}", {"metadata": {"labels": body["metadata"]["labels"]}})
    directory = tmp_path / "kueue"
    directory.mkdir()
    try:
        async with kueue(api, directory, *found):
            yield api
            await _empty(api)
    finally:
        await uninstall(api)


async def _empty(api: Api) -> None:
    for path in (JOBS, WORKLOADS, f"{GROUP}/namespaces/default/localqueues", f"{GROUP}/clusterqueues"):
        for found in await api.items(path):
            await api.patch(f"{path}/{found['metadata']['name']}", {"metadata": {"finalizers": None}})
            await api.delete(f"{path}/{found['metadata']['name']}")
    for kind in ("resourceflavors", "topologies", "workloadpriorityclasses"):
        for found in await api.items(f"{GROUP}/{kind}"):
            await api.patch(f"{GROUP}/{kind}/{found['metadata']['name']}", {"metadata": {"finalizers": None}})
            await api.delete(f"{GROUP}/{kind}/{found['metadata']['name']}")


@pytest_asyncio.fixture
async def operator(
    queues: Api, kubelet: Kubelet, start_operator: StartOperator, session: aiohttp.ClientSession, tmp_path: Path
) -> Kubelet:
    """The operator with exactly the rights that the chart gives it with `queues.kueue.enabled`."""
    for path, body in role_rules.objects(optional=("kueueRules",), everywhere=("kueueClusterRules",)):
        name = body["metadata"]["name"]
        await queues.call("DELETE", f"{path}/{name}", {}, ok=False)
        await queues.call("POST", path, body, ok=False)
    path, body = role_rules.token_request()
    token = (await queues.create(path, body))["status"]["token"]
    profiles = tmp_path / "profiles.yaml"
    profiles.write_text(PROFILES)
    await start_operator(kubeconfig=write_kubeconfig(tmp_path / "queues", queues.url, token), profiles_file=profiles)
    return kubelet


async def queue(api: Api, name: str, gpus: dict[str, int], **spec: Any) -> None:
    """A queue of the namespace, with its cluster queue and flavors."""
    for one in gpus:
        await api.call("POST", f"{GROUP}/resourceflavors", flavor(one), ok=False)
    await api.create(f"{GROUP}/clusterqueues", cluster_queue(name, gpus, **spec))
    await api.create(f"{GROUP}/namespaces/default/localqueues", local_queue(name, name))


def queued(name: str, queue: str, pods: int, labels: dict[str, str] | None = None, **spec: Any) -> KubeObject:
    """A job of so many pods of two GPUs in a queue of Kueue."""
    spec = {"replicas": pods, "parallelism": {"tensor": 2, "pipeline": 1, "microBatches": 1}, **spec}
    spec["training"] = {"steps": 50, "globalBatchSize": 24, "sequenceLength": 64}
    body = job(name, **spec)
    body["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": queue, **(labels or {})}
    return body


async def claimed(api: Api) -> None:
    """The claim that jobs with checkpoints name."""
    size = {"requests": {"storage": "1Gi"}}
    body = {"metadata": {"name": "checkpoints"}, "spec": {"accessModes": ["ReadWriteMany"], "resources": size}}
    await api.call("POST", "/api/v1/namespaces/default/persistentvolumeclaims", body, ok=False)


async def workload(api: Api, name: str) -> KubeObject:
    owned = [one for one in await api.items(WORKLOADS) if one["metadata"]["ownerReferences"][0]["name"] == name]
    return owned[0] if owned else {}


async def says(api: Api, name: str, reason: str, seconds: float = 60) -> KubeObject:
    """Waits until `Ready` has this reason, and gives the status."""

    async def there() -> KubeObject | None:
        status = await api.status(name)
        return status if condition(status, "Ready").get("reason") == reason else None

    found: KubeObject = await until(there, f"{name} is {reason}", seconds)
    return found


async def workload_is(api: Api, name: str, kind: str, value: str = "True", seconds: float = 60) -> KubeObject:
    async def there() -> KubeObject | None:
        found = await workload(api, name)
        return found if condition(found.get("status") or {}, kind).get("status") == value else None

    found: KubeObject = await until(there, f"the Workload of {name} is {kind}={value}", seconds)
    return found


async def finish(kubelet: Kubelet, name: str) -> None:
    for agent in kubelet.of(name):
        await agent.finish()


def seconds_queued(status: KubeObject) -> float:
    return sum(entry["milliseconds"] for entry in status["goodput"]["booked"] if entry["cause"] == "Queued") / 1000


async def test_a_job_is_admitted_and_another_one_waits_until_there_is_quota(
    operator: Kubelet, queues: Api, settled: Settled
) -> None:
    await queue(queues, "team", {"default": 8})
    await queues.create(JOBS, queued("first", "team", 4))
    await settled("first")
    owned = await workload_is(queues, "first", "PodsReady")
    assert owned["spec"]["podSets"][0]["count"] == 4
    assert owned["spec"]["queueName"] == "team"
    assert condition(owned["status"], "Admitted")["status"] == "True"

    began = datetime.now(UTC)
    await queues.create(JOBS, queued("second", "team", 2))
    await says(queues, "second", "WaitingForQuota")
    assert "insufficient unused quota" in (await _message(queues, "second", "insufficient"))
    await asyncio.sleep(WAIT_SECONDS)
    assert await queues.pods("second") == []
    assert condition(await queues.status("second"), "Ready")["reason"] == "WaitingForQuota"
    assert condition(await queues.status("second"), "Stalled")["status"] == "False"

    await finish(operator, "first")
    await workload_is(queues, "first", "Finished")
    assert condition((await workload(queues, "first"))["status"], "Finished")["reason"] == "Succeeded"
    status = await settled("second")
    waited = (datetime.now(UTC) - began).total_seconds()
    assert WAIT_SECONDS - 2 < seconds_queued(status) < waited + 5


async def test_quota_counts_what_the_sidecars_of_a_profile_request(
    operator: Kubelet, queues: Api, settled: Settled
) -> None:
    quota = {"nvidia.com/gpu": "8", "cpu": "7", "memory": "16Gi"}
    resources = [{"name": name, "nominalQuota": value} for name, value in quota.items()]
    group = {"coveredResources": list(quota), "flavors": [{"name": "default", "resources": resources}]}
    await queue(queues, "team", {"default": 8}, resourceGroups=[group])
    workers = {"image": "i", "gpusPerWorker": 2, "profile": "daemon"}
    await queues.create(JOBS, queued("first", "team", 2, workers=workers))
    await settled("first")
    (assigned,) = (await workload(queues, "first"))["status"]["admission"]["podSetAssignments"]
    assert assigned["resourceUsage"] == {"nvidia.com/gpu": "4", "cpu": "4", "memory": "2Gi"}
    await queues.create(JOBS, queued("second", "team", 2, workers=workers))
    assert "insufficient unused quota for cpu" in (await _message(queues, "second", "insufficient"))


async def _message(api: Api, name: str, words: str) -> str:
    async def there() -> str | None:
        text = str(condition(await api.status(name), "Ready").get("message", ""))
        return text if words in text else None

    found: str = await until(there, f"{name} says {words}", 60)
    return found


async def test_a_job_is_preempted_saves_gives_its_quota_back_and_resumes(
    operator: Kubelet, queues: Api, settled: Settled
) -> None:
    for name, value in (("low", 1), ("high", 100)):
        body = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "WorkloadPriorityClass", "value": value}
        await queues.create(f"{GROUP}/workloadpriorityclasses", {**body, "metadata": {"name": name}})
    await queue(queues, "team", {"default": 8}, preemption={"withinClusterQueue": "LowerPriority"})
    await claimed(queues)
    priority = {"kueue.x-k8s.io/priority-class": "low"}
    await queues.create(JOBS, queued("modest", "team", 4, priority, checkpoint=CLAIM))
    await settled("modest")
    await asyncio.sleep(2)
    await queues.create(JOBS, queued("urgent", "team", 4, {"kueue.x-k8s.io/priority-class": "high"}))
    status = await settled("urgent")
    assert await queues.pods("modest") == []
    stopped = await says(queues, "modest", "WaitingForQuota")
    saved = stopped["checkpoint"]["step"]
    assert saved > 0
    assert "Preempted to accommodate" in (await _message(queues, "modest", "Preempted"))
    assert f"step {saved}" in condition(stopped, "Ready")["message"]
    assert condition((await workload(queues, "modest"))["status"], "QuotaReserved")["status"] == "False"
    assert "admission" not in (await workload(queues, "modest"))["status"]

    await finish(operator, "urgent")
    status = await settled("modest")
    assert status["mesh"]["generation"] == 2
    assert [entry["cause"] for entry in status["restarts"]] == ["JobPreempted"]
    assert status["restartsTowardLimit"] == 0 if "restartsTowardLimit" in status else True
    await queues.posted("modest", "Preempted")
    assert condition((await workload(queues, "modest"))["status"], "Admitted")["status"] == "True"


async def test_an_elastic_job_is_admitted_in_part(operator: Kubelet, queues: Api, settled: Settled) -> None:
    await queue(queues, "team", {"default": 5})
    await claimed(queues)
    await queues.create(JOBS, queued("part", "team", 4, elastic={"minReplicas": 1}, checkpoint=CLAIM))
    status = await settled("part")
    assert status["replicas"] == 2, "five GPUs are enough for two replicas of two"
    found = await workload(queues, "part")
    assert found["spec"]["podSets"][0]["minCount"] == 1
    assert found["status"]["admission"]["podSetAssignments"][0]["count"] == 2
    assert len(await queues.pods("part")) == 2
    await asyncio.sleep(3)
    assert (await queues.status("part"))["replicas"] == 2, "more nodes are free, and more quota is not"


async def test_pods_run_where_flavor_and_topology_say_and_ranks_follow(
    operator: Kubelet, queues: Api, settled: Settled
) -> None:
    await queues.create(f"{GROUP}/topologies", topology("racks", RACK, HOST))
    spec = flavor("pool-b", "racks", pool="b")
    await queues.create(f"{GROUP}/resourceflavors", spec)
    await queue(queues, "team", {"pool-b": 8})
    asked = {"annotations": {"kueue.x-k8s.io/podset-required-topology": RACK}}
    workers = {"image": "meshwright/worker", "gpusPerWorker": 2, **asked}
    await queues.create(JOBS, queued("racked", "team", 2, workers=workers))
    status = await settled("racked")
    nodes = {entry["node"] for entry in status["placement"]["workers"]}
    assert nodes in ({"n4", "n5"}, {"n6", "n7"}), "one rack of the pool"
    assigned = (await workload(queues, "racked"))["status"]["admission"]["podSetAssignments"][0]
    assert assigned["topologyAssignment"]["levels"] == [HOST]
    for found in await queues.pods("racked"):
        assert found["spec"]["nodeSelector"] == {"pool": "b"}
        assert found["metadata"]["annotations"]["kueue.x-k8s.io/podset-required-topology"] == RACK
    # The other rack is still there for a job of the same size, although the first one's pods are no pods of Kueue's.
    await queues.create(JOBS, queued("other", "team", 2, workers=workers))
    other = await settled("other")
    assert not nodes & {entry["node"] for entry in other["placement"]["workers"]}


async def test_a_suspended_job_gives_its_quota_back_and_an_edit_of_its_size_asks_anew(
    operator: Kubelet, queues: Api, settled: Settled
) -> None:
    await queue(queues, "team", {"default": 8})
    await queues.create(JOBS, queued("edited", "team", 2))
    await settled("edited")
    await queues.patch(f"{JOBS}/edited", {"spec": {"suspend": True}})
    await workload_is(queues, "edited", "QuotaReserved", "False")
    assert (await workload(queues, "edited"))["spec"]["active"] is False
    await queues.patch(f"{JOBS}/edited", {"spec": {"suspend": False}})
    await settled("edited")
    await queues.patch(f"{JOBS}/edited", {"spec": {"replicas": 4}})

    async def grown() -> bool:
        status = await queues.status("edited")
        return status.get("replicas") == 4 and condition(status, "Ready").get("reason") == "Running"

    await until(grown, "it runs with four replicas", 90)
    assert (await workload(queues, "edited"))["spec"]["podSets"][0]["count"] == 4
    assert len(await queues.items(WORKLOADS)) == 1
    await queues.delete(f"{JOBS}/edited")
