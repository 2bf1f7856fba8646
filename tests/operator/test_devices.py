"""Devices behind Dynamic Resource Allocation: what nodes have, and that placement puts no job where it is missing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from meshwright.api.labels import ANNOTATION_DEVICES
from meshwright.devices.amounts import amounts_by_node
from meshwright.devices.claims import CLASS_PREFIX, AllocatedClaim, Wanted, read_claim, wanted_by
from meshwright.devices.slices import devices_by_node
from meshwright.planner.cluster.pod_resources import Resources, pod_request
from meshwright_operator.devices import inventory
from meshwright_operator.devices.inventory import DeviceInventory
from meshwright_operator.devices.node_selector import selected
from meshwright_operator.kube.cache import Cache
from meshwright_operator.kube.client import ApiError, KubeClient, Page
from meshwright_operator.kube.pod_requests import read_pod_request, request_json_for
from meshwright_operator.kube.watch_liveness import WatchLiveness
from meshwright_operator.manifests.owned_objects import owner_reference
from meshwright_operator.operator_metrics import OperatorMetrics
from tests.operator.support import node, until

GPU = "gpu.nvidia.com"
GPU_CLASS = ("device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'",)
MIG_CLASS = ("device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'mig'",)
CLASSES = {GPU: (GPU_CLASS, "nvidia.com/gpu"), "mig.nvidia.com": (MIG_CLASS, "")}


def gpu(name: str, kind: str = "gpu", **fields: Any) -> dict[str, Any]:
    return {"name": name, "attributes": {"type": {"string": kind}, "productName": {"string": "H100"}}, **fields}


def resource_slice(host: str | None, devices: list[dict[str, Any]], **pool: Any) -> dict[str, Any]:
    owner = {"nodeName": host} if host else {"allNodes": True}
    spec = {"driver": GPU, "pool": {"name": host or "shared", "generation": 1, "resourceSliceCount": 1, **pool}}
    return {"metadata": {"name": f"{host}-{pool}"}, "spec": {**spec, **owner, "devices": devices}}


def counted(slices: list[dict[str, Any]], claims: Any = (), requested: Any = (), with_pod: bool = False) -> Any:
    nodes = devices_by_node(slices)
    return amounts_by_node(nodes, CLASSES, claims, requested, lambda claim: with_pod)


def claim(
    devices: list[str], host: str = "n0", count: int = 1, kind: str = "exactly", **metadata: Any
) -> AllocatedClaim:
    found = read_claim(
        {
            "metadata": {"name": "c", "namespace": "x", **metadata},
            "spec": {"devices": {"requests": [{"name": "r", kind: {"deviceClassName": GPU, "count": count}}]}},
            "status": {
                "allocation": {
                    "devices": {"results": [{"driver": GPU, "pool": host, "device": name} for name in devices]}
                }
            },
        }
    )
    assert found is not None
    return found


def test_devices_of_a_class_are_a_resource_of_the_node_also_under_its_extended_name() -> None:
    slices = [resource_slice("n0", [gpu("g0"), gpu("g1"), gpu("m0", "mig")]), resource_slice("n1", [])]
    assert counted(slices) == {
        "n0": {f"{CLASS_PREFIX}{GPU}": 2, "nvidia.com/gpu": 2, f"{CLASS_PREFIX}mig.nvidia.com": 1},
        "n1": {},
    }


def test_only_complete_pools_of_the_newest_generation_and_devices_of_one_node_count() -> None:
    old = resource_slice("n0", [gpu(f"g{n}") for n in range(8)])
    new = resource_slice("n0", [gpu("g0")], generation=2)
    assert counted([old, new])["n0"]["nvidia.com/gpu"] == 1
    half = resource_slice("n1", [gpu("g0")], resourceSliceCount=2)
    assert counted([half, resource_slice(None, [gpu("g0")])]) == {}
    tainted = gpu("g1", taints=[{"key": "unhealthy", "effect": "NoSchedule"}])
    assert counted([resource_slice("n0", [gpu("g0"), tainted])])["n0"]["nvidia.com/gpu"] == 1
    assert counted([{"spec": {"driver": 3}}, {}, {"spec": None}]) == {}


def test_partitions_that_share_counters_are_not_counted_twice() -> None:
    shared = [{"name": "gpu-0", "counters": {"memory": {"value": "80Gi"}}}]

    def part(name: str, kind: str, memory: str) -> dict[str, Any]:
        consumes = [{"counterSet": "gpu-0", "counters": {"memory": {"value": memory}}}]
        return gpu(name, kind, consumesCounters=consumes)

    devices = [part("whole", "gpu", "80Gi"), *(part(f"m{n}", "mig", "40Gi") for n in range(4))]
    one = resource_slice("n0", devices)
    one["spec"]["sharedCounters"] = shared
    assert counted([one])["n0"][f"{CLASS_PREFIX}mig.nvidia.com"] == 2
    used = claim(["m0"])
    after = counted([one], [used])["n0"]
    assert "nvidia.com/gpu" not in after, "the rest of the GPU is too small"
    assert after[f"{CLASS_PREFIX}mig.nvidia.com"] == 1


def test_devices_of_claims_are_subtracted_unless_a_pods_request_counts_them() -> None:
    slices = [resource_slice("n0", [gpu(f"g{n}") for n in range(4)])]
    name = f"{CLASS_PREFIX}{GPU}"
    foreign = claim(["g0"])
    assert counted(slices, [foreign])["n0"][name] == 3
    newer = claim(["g0"], kind="oneOfANewerKubernetes")
    assert counted(slices, [newer])["n0"][name] == 3, "whatever was requested, its device is taken"
    extended = claim(["g0"], annotations={"resource.kubernetes.io/extended-resource-claim": "true"})
    assert counted(slices, [extended])["n0"]["nvidia.com/gpu"] == 4, "the pod requests nvidia.com/gpu"
    own = claim(["g0", "g1"], count=2, ownerReferences=[{"kind": "Pod", "name": "job-w0-0", "uid": "u"}])
    assert counted(slices, [own], with_pod=True)["n0"][name] == 4
    assert counted(slices, [own], with_pod=False)["n0"][name] == 2, "the pod is gone, and the claim not yet"
    special = Wanted(GPU, ("device.attributes['gpu.nvidia.com'].productName == 'H100'",))
    assert counted(slices, [own], [special], with_pod=True)["n0"][special.resource] == 2, "counted under another name"


def test_a_selector_that_cannot_be_evaluated_selects_nothing() -> None:
    slices = [resource_slice("n0", [gpu("g0")])]
    for expression in ("device.attributes['x'].y == 1", "device.capacity[", "semver('1').isGreaterThan(2)", "1"):
        wanted = Wanted(GPU, (expression,))
        assert wanted.resource not in counted(slices, requested=[wanted])["n0"]


def test_what_a_claim_requests() -> None:
    exact = {"deviceClassName": GPU, "count": 4, "selectors": [{"cel": {"expression": "true"}}]}
    first = [{"deviceClassName": "a", "count": 2}, {"deviceClassName": "b"}]
    requests = [{"name": "x", "exactly": exact}, {"name": "y", "firstAvailable": first}]
    assert wanted_by({"devices": {"requests": requests}}) == {Wanted(GPU, ("true",)): 4, Wanted("a"): 2}
    assert Wanted(GPU).resource == "deviceclass.resource.kubernetes.io/gpu.nvidia.com"
    with pytest.raises(ValueError, match="neither"):
        wanted_by({"devices": {"requests": [{"name": "z"}]}})


def test_nodes_of_the_cache_have_their_devices_until_these_are_gone() -> None:
    cache = Cache()
    bare = node("n0", "r0", 0)
    del bare["status"]["allocatable"]["nvidia.com/gpu"]
    cache.put_node(bare)
    assert cache.set_device_amounts({"n0": {"nvidia.com/gpu": 8}})
    assert cache.nodes["n0"]["status"]["allocatable"]["nvidia.com/gpu"] == "8"
    assert not cache.set_device_amounts({"n0": {"nvidia.com/gpu": 8}})
    bare["metadata"]["resourceVersion"] = "9"
    bare["spec"] = {"unschedulable": True}
    cache.put_node(bare)
    assert cache.nodes["n0"]["status"]["allocatable"]["nvidia.com/gpu"] == "8", "also after the node changes"
    assert cache.set_device_amounts({})
    assert "nvidia.com/gpu" not in cache.nodes["n0"]["status"]["allocatable"]
    plugin = node("n1", "r0", 4)
    cache.put_node(plugin)
    cache.set_device_amounts({"n1": {"nvidia.com/gpu": 8, "a/b": 1}})
    assert cache.nodes["n1"]["status"]["allocatable"]["nvidia.com/gpu"] == "4", "what the node itself offers"
    cache.set_device_amounts({})
    assert cache.nodes["n1"]["status"]["allocatable"]["nvidia.com/gpu"] == "4"


def test_a_worker_pod_counts_what_its_annotation_says() -> None:
    name = f"{CLASS_PREFIX}{GPU}"
    pod = {
        "metadata": {
            "name": "job-w0-0",
            "namespace": "x",
            "annotations": {ANNOTATION_DEVICES: f'{{"{name}": 8}}'},
            "ownerReferences": [owner_reference("job", "u")],
        },
        "spec": {
            "nodeName": "n0",
            "containers": [{"resources": {"requests": {"cpu": "1"}}}],
            "resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "gpus"}],
        },
    }
    request = read_pod_request(pod, {})
    assert request is not None
    assert request.amount(name).gpus == 8
    assert dict(request.amount("nvidia.com/gpu").others) == {name: 8}
    assert pod_request(pod, name) == request.amount(name)
    amount = Resources(gpus=2, pods=1, others=((name, 3), ("host-port/9464", 1)))
    text = request_json_for(amount, "nvidia.com/gpu")
    assert pod_request({"spec": json.loads(text)}, "nvidia.com/gpu") == amount
    pod["metadata"]["annotations"][ANNOTATION_DEVICES] = "[1]"
    assert read_pod_request(pod, {}) is not None, "a damaged annotation affects only its own pod"


def test_node_selectors_of_allocated_claims() -> None:
    obj = node("n0", "r0")
    terms = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n0"]}]}]
    assert selected(obj, {"nodeSelectorTerms": terms})
    assert not selected(node("n1", "r0"), {"nodeSelectorTerms": terms})
    host = [{"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["n0"]}]
    assert not selected(obj, {"nodeSelectorTerms": [{"matchExpressions": host}]})
    assert not selected(obj, {"nodeSelectorTerms": []})


class Devices(KubeClient):
    """Collections without objects, after an error or an answer that does not come."""

    def __init__(self, first: ApiError | None) -> None:
        self.first = first
        self.failed = False

    async def pages(self, path: str, **query: str) -> AsyncIterator[Page]:
        if not self.failed:
            self.failed = True
            if self.first is None:
                await asyncio.sleep(3600)
            else:
                raise self.first
        yield Page([], "1")


@pytest.mark.parametrize("first", [ApiError(500, "InternalError", "no"), ApiError(410, "Expired", "too slow"), None])
async def test_devices_are_counted_soon_after_a_first_look_that_failed(
    first: ApiError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster with thousands of slices may not be listed before the operator has to start."""
    monkeypatch.setattr(inventory, "ERROR_SECONDS", 0.01)
    found = DeviceInventory(Devices(first), Cache(), lambda: None)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(found.load(), 0.05)
    assert not found.available
    running = asyncio.create_task(found.run(WatchLiveness(OperatorMetrics(), 60), 60))

    async def counted() -> bool:
        return found.available

    await until(counted, "devices are counted", 60)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("code", [403, 404])
async def test_a_cluster_without_the_api_is_asked_again_rarely(code: int) -> None:
    found = DeviceInventory(Devices(ApiError(code, "No", "no")), Cache(), lambda: None)
    assert not await found.load()
    assert found._retry_seconds == inventory.RETRY_SECONDS
