"""Jobs whose pods claim devices through Dynamic Resource Allocation, and the ComputeDomain that joins their hosts."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from meshwright.api.labels import ANNOTATION_DEVICES
from meshwright.api.objects import KubeObject
from meshwright.devices.claims import CHANNEL_CLASS, CLASS_PREFIX
from meshwright_operator.kube.paths import COMPUTE_DOMAINS, DEVICES
from tests.operator import role_rules
from tests.operator.conftest import StartOperator
from tests.operator.proxy import Proxy
from tests.operator.support import JOBS, PODS, Api, condition, until, write_kubeconfig
from tests.operator.test_devices import CLASSES, GPU, gpu, resource_slice
from tests.operator.test_gang_races import small
from tests.operator.world import World

NIC = "mrdma.example.com"
TEMPLATES = f"{DEVICES}/namespaces/default/resourceclaimtemplates"
CLAIMS = f"{DEVICES}/namespaces/default/resourceclaims"


def template(name: str, device_class: str = NIC, count: int = 1) -> KubeObject:
    requests = [{"name": "r", "exactly": {"deviceClassName": device_class, "count": count}}]
    return {"metadata": {"name": name}, "spec": {"spec": {"devices": {"requests": requests}}}}


def device_class(name: str, *expressions: str, extended: str = "") -> KubeObject:
    spec = {"selectors": [{"cel": {"expression": text}} for text in expressions]}
    return {"metadata": {"name": name}, "spec": {**spec, **({"extendedResourceName": extended} if extended else {})}}


def nic_slice(host: str, count: int) -> KubeObject:
    body = resource_slice(host, [{"name": f"nic{n}"} for n in range(count)])
    body["spec"]["driver"] = NIC
    body["metadata"]["name"] = f"{host}-nic"
    return body


def put(world: World, path: str, body: KubeObject) -> None:
    body.setdefault("status", {})
    world.cluster.put(f"{path}/{body['metadata']['name']}", body)


def nics(world: World, counts: list[int]) -> None:
    put(world, f"{DEVICES}/deviceclasses", device_class(NIC, f"device.driver == '{NIC}'"))
    for host, count in zip(world.nodes, counts, strict=True):
        put(world, f"{DEVICES}/resourceslices", nic_slice(host, count))


def claiming(name: str, **fields: Any) -> dict[str, Any]:
    body = small(name, 2)
    body["spec"]["workers"] |= fields or {
        "resourceClaims": [{"name": "nic", "resourceClaimTemplateName": "nics", "request": "r"}]
    }
    return body


async def test_a_job_waits_for_its_template_and_then_for_nodes_with_the_devices() -> None:
    world = World(41, nodes=3, work=10**6)
    nics(world, [1, 0, 1])
    assert await world.operators[0].devices.load()
    world.submit(claiming("job"))
    await world.run(4)
    message = world.condition("job", "Placed")["message"]
    assert message == (
        "ResourceClaimTemplate `nics` (`spec.workers.resourceClaims[0].resourceClaimTemplateName`) does not exist in "
        "namespace default. Create it, or correct the field"
    )
    assert world.condition("job", "Placed")["reason"] == "ClaimNotFound"
    put(world, TEMPLATES, template("nics"))
    await world.run(60)
    assert world.true("job", "Ready")
    assert sorted(pod.node for pod in world.pods("job")) == ["n0", "n2"]
    spec = world.cluster.objects[f"{PODS}/job-w0-0"]["spec"]
    assert spec["resourceClaims"] == [{"name": "nic", "resourceClaimTemplateName": "nics"}]
    assert spec["containers"][0]["resources"]["claims"] == [{"name": "nic", "request": "r"}]
    world.submit(claiming("other"))
    await world.run(20)
    assert f"too little {CLASS_PREFIX}{NIC}" in world.condition("other", "Placed")["message"]


async def test_gpus_that_a_claim_has_are_not_requested_twice() -> None:
    world = World(42, nodes=2, work=10**6)
    for host in world.nodes.values():
        host["status"]["allocatable"].pop("nvidia.com/gpu")
        world.operators[0].cache.put_node({**host, "metadata": {**host["metadata"], "resourceVersion": "999"}})
    put(world, f"{DEVICES}/deviceclasses", device_class(GPU, *CLASSES[GPU][0], extended="nvidia.com/gpu"))
    for host in world.nodes:
        put(world, f"{DEVICES}/resourceslices", resource_slice(host, [gpu("g0"), gpu("g1")]))
    put(world, TEMPLATES, template("gpus", GPU, 2))
    assert await world.operators[0].devices.load()
    claims = [{"name": "gpus", "resourceClaimTemplateName": "gpus"}]
    world.submit(claiming("claims", gpuResource=f"{CLASS_PREFIX}{GPU}", resourceClaims=claims))
    await world.run(20)
    pods = world.pods("claims")
    assert sorted(pod.node for pod in pods) == ["n0", "n1"]
    pod = world.cluster.objects[f"{PODS}/claims-w0-0"]
    assert json.loads(pod["metadata"]["annotations"][ANNOTATION_DEVICES]) == {f"{CLASS_PREFIX}{GPU}": 2}
    resources = pod["spec"]["containers"][0]["resources"]
    assert f"{CLASS_PREFIX}{GPU}" not in resources["limits"]
    world.submit(claiming("second", gpuResource=f"{CLASS_PREFIX}{GPU}", resourceClaims=claims))
    await world.run(20)
    assert world.condition("second", "Placed")["status"] == "False", "all GPUs are in use"


async def test_gpus_behind_an_extended_resource_are_counted() -> None:
    world = World(43, nodes=2, work=10**6)
    for host in world.nodes.values():
        host["status"]["allocatable"]["nvidia.com/gpu"] = "0"
        world.operators[0].cache.put_node({**host, "metadata": {**host["metadata"], "resourceVersion": "999"}})
    world.submit(small("job", 2))
    await world.run(5)
    assert not world.pods()
    put(world, f"{DEVICES}/deviceclasses", device_class(GPU, *CLASSES[GPU][0], extended="nvidia.com/gpu"))
    for host in world.nodes:
        put(world, f"{DEVICES}/resourceslices", resource_slice(host, [gpu("g0"), gpu("g1")]))
    assert await world.operators[0].devices.load()
    world.operators[0].nodes_changed()
    await world.run(20)
    assert sorted(pod.node for pod in world.pods("job")) == ["n0", "n1"]


async def test_a_claim_that_pods_share_must_have_devices_and_its_nodes_are_the_only_ones() -> None:
    world = World(44, nodes=4, work=10**6)
    nics(world, [1, 1, 1, 1])
    await world.operators[0].devices.load()
    shared = {**template("shared"), "spec": template("shared")["spec"]["spec"]}
    put(world, CLAIMS, shared)
    world.submit(claiming("job", resourceClaims=[{"name": "nic", "resourceClaimName": "shared"}]))
    await world.run(5)
    assert (
        "ResourceClaim `shared` (`spec.workers.resourceClaims[0].resourceClaimName`) has no devices yet. Several"
        in (world.condition("job", "Placed")["message"])
    )
    values = {"key": "metadata.name", "operator": "In", "values": ["n1", "n3"]}
    selector = {"nodeSelectorTerms": [{"matchFields": [values]}]}
    body = world.cluster.objects[f"{CLAIMS}/shared"]
    body["status"] = {"allocation": {"nodeSelector": selector, "devices": {"results": []}}}
    world.cluster.update(f"{CLAIMS}/shared", body)
    await world.run(90)
    assert sorted(pod.node for pod in world.pods("job")) == ["n1", "n3"]


async def test_a_job_over_nvlink_of_several_nodes_makes_a_compute_domain_and_claims_its_channel() -> None:
    world = World(45, nodes=2, gpus=4, work=10**6)
    body = small("job", 2, topology={"multiNodeNVLink": True})
    world.submit(body)
    await world.run(5)
    placed = world.condition("job", "Placed")
    assert (placed["reason"], placed["status"]) == ("ClaimNotFound", "False")
    assert "does not have `computedomains.resource.nvidia.com` (`spec.topology.multiNodeNVLink`)" in placed["message"]
    assert "Install NVIDIA's DRA driver for GPUs, or remove the field" in placed["message"]
    world.cluster.objects[COMPUTE_DOMAINS] = {"metadata": {"name": "v1beta1", "uid": "x"}}
    put(world, f"{DEVICES}/deviceclasses", device_class(CHANNEL_CLASS, "device.driver == 'compute-domain.nvidia.com'"))
    for host in world.nodes:
        channel = resource_slice(host, [{"name": "channel-0"}])
        channel["spec"]["driver"] = "compute-domain.nvidia.com"
        put(world, f"{DEVICES}/resourceslices", channel)
    assert await world.operators[0].devices.load()
    await world.run(60)
    assert world.true("job", "Ready")
    uid = world.cluster.objects[f"{JOBS}/job"]["metadata"]["uid"]
    (domain,) = list(world.cluster.of("computedomains"))
    name = f"job-{uid[:8]}"
    assert domain["metadata"]["name"] == name
    assert domain["metadata"]["ownerReferences"][0]["uid"] == uid
    assert domain["spec"] == {"numNodes": 0, "channel": {"resourceClaimTemplate": {"name": f"{name}-nvlink"}}}
    spec = world.cluster.objects[f"{PODS}/job-w0-0"]["spec"]
    assert spec["resourceClaims"] == [{"name": "nvlink", "resourceClaimTemplateName": f"{name}-nvlink"}]
    assert spec["containers"][0]["resources"]["claims"] == [{"name": "nvlink"}]
    assert sorted(pod.node for pod in world.pods("job")) == ["n0", "n1"], "each node has one channel"


RESOURCES = ("nvidia.com/gpu", "rdma/ib", "hugepages-2Mi", NIC)


@pytest.mark.parametrize("seed", range(6))
async def test_no_job_is_placed_on_nodes_that_lack_what_its_pods_request(seed: int) -> None:
    rng = random.Random(seed)
    world = World(seed, nodes=6, gpus=4, work=10**6)
    have: dict[str, Counter[str]] = {}
    for name, host in world.nodes.items():
        amounts = {"rdma/ib": rng.randrange(3), "hugepages-2Mi": rng.randrange(3) << 30}
        host["status"]["allocatable"] |= {key: str(value) for key, value in amounts.items()}
        world.operators[0].cache.put_node({**host, "metadata": {**host["metadata"], "resourceVersion": "999"}})
        have[name] = Counter({"nvidia.com/gpu": 4, **amounts, NIC: rng.randrange(4)})
    nics(world, [have[name][NIC] for name in world.nodes])
    for count in (1, 2):
        put(world, TEMPLATES, template(f"nics{count}", NIC, count))
    assert await world.operators[0].devices.load()
    wanted: dict[str, Counter[str]] = {}
    for number in range(5):
        name = f"job{number}"
        wanted[name] = Counter({"nvidia.com/gpu": 2, **dict(_needs(rng))})
        world.submit(_job(name, rng.randrange(1, 4), wanted[name]))
        await world.run(8)
    await world.run(20)
    used: dict[str, Counter[str]] = {name: Counter() for name in world.nodes}
    for pod in world.pods():
        used[pod.node].update(wanted[pod.job])
    assert world.pods()
    for name in world.nodes:
        for resource in RESOURCES:
            assert used[name][resource] <= have[name][resource], (name, resource)


def _needs(rng: random.Random) -> Iterator[tuple[str, int]]:
    if rng.random() < 0.5:
        yield "rdma/ib", 1
    if rng.random() < 0.4:
        yield "hugepages-2Mi", 1 << 30
    if rng.random() < 0.6:
        yield NIC, rng.randrange(1, 3)


def _job(name: str, workers: int, needs: Counter[str]) -> dict[str, Any]:
    body = small(name, workers)
    resources: dict[str, Any] = {"memory": "1Gi"}
    if needs["rdma/ib"]:
        resources["devices"] = {"rdma/ib": needs["rdma/ib"]}
    if needs["hugepages-2Mi"]:
        resources["hugePages"] = {"2Mi": "1Gi"}
    body["spec"]["workers"]["resources"] = resources
    if needs[NIC]:
        claim = {"name": "nic", "resourceClaimTemplateName": f"nics{needs[NIC]}"}
        body["spec"]["workers"]["resourceClaims"] = [claim]
    return body


DOMAINS = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "computedomains.resource.nvidia.com"},
    "spec": {
        "group": "resource.nvidia.com",
        "names": {"kind": "ComputeDomain", "plural": "computedomains"},
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1beta1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {
                                "type": "object",
                                "required": ["channel", "numNodes"],
                                "properties": {
                                    "numNodes": {"type": "integer"},
                                    "channel": {
                                        "type": "object",
                                        "required": ["resourceClaimTemplate"],
                                        "properties": {
                                            "resourceClaimTemplate": {
                                                "type": "object",
                                                "required": ["name"],
                                                "properties": {"name": {"type": "string"}},
                                            }
                                        },
                                    },
                                },
                            }
                        },
                    }
                },
            }
        ],
    },
}
"""The fields that NVIDIA's definition requires."""


async def test_devices_claims_and_compute_domains_of_a_real_server(
    api: Api,
    real_server: str,
    start_operator: StartOperator,
    session: aiohttp.ClientSession,
    operators_token: str,
    tmp_path: Path,
) -> None:
    if not real_server:
        pytest.skip("the embedded server has no devices")
    await api.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", DOMAINS, ok=False)
    await until(lambda: _served(api), "ComputeDomains are served")
    await api.create(f"{DEVICES}/deviceclasses", device_class(NIC, f"device.driver == '{NIC}'"))
    for host, count in (("n0", 1), ("n2", 1), ("n3", 0)):
        body = nic_slice(host, count)
        await api.create(f"{DEVICES}/resourceslices", body)
    async with Proxy(api.url, session).serving() as proxy:
        await start_operator(kubeconfig=write_kubeconfig(tmp_path / "behind", proxy.url, operators_token))
        await _life_with_devices(api)
    groups = (DEVICES.split("/")[2], COMPUTE_DOMAINS.split("/")[2])
    used = {right for request in proxy.requests if (right := request.right) is not None and right[0] in groups}
    assert used == {right for right in role_rules.rights() if right[0] in groups}


async def _life_with_devices(api: Api) -> None:
    """A job that claims devices and NVLink, and one that names a claim: they make the operator use each right."""
    await api.create(JOBS, claiming("shared", resourceClaims=[{"name": "nic", "resourceClaimName": "nobodys"}]))
    body = claiming("claims")
    body["spec"]["topology"] = {"multiNodeNVLink": True}
    await api.create(JOBS, body)

    async def missing() -> bool:
        found = [condition(await api.status(name), "Placed").get("reason") for name in ("claims", "shared")]
        return found == ["ClaimNotFound"] * 2

    await until(missing, "the template and the claim are missing")
    await api.create(TEMPLATES, template("nics"))

    async def both() -> list[KubeObject]:
        found = await api.pods("claims")
        return found if len(found) == len(("n0", "n2")) else []

    pods = await until(both, "the pods are created", 60)
    affinities = [json.dumps(pod["spec"]["affinity"]) for pod in pods]
    assert sorted(name for name in ("n0", "n1", "n2", "n3") if any(f'"{name}"' in text for text in affinities)) == [
        "n0",
        "n2",
    ]
    uid = (await api.job("claims"))["metadata"]["uid"]
    (domain,) = await api.items(f"{COMPUTE_DOMAINS}/namespaces/default/computedomains")
    assert domain["metadata"]["ownerReferences"][0]["uid"] == uid
    assert {claim["name"] for claim in pods[0]["spec"]["resourceClaims"]} == {"nic", "nvlink"}
    first = {pod["metadata"]["uid"] for pod in pods}
    await api.delete(f"{PODS}/{pods[0]['metadata']['name']}")

    async def created_again() -> bool:
        return len({pod["metadata"]["uid"] for pod in await api.pods("claims")} - first) > 0

    await until(created_again, "the lost pod is created again, and the ComputeDomain is found", 60)
    for name in ("claims", "shared"):
        await api.delete(f"{JOBS}/{name}")


async def _served(api: Api) -> bool:
    try:
        return "items" in await api.call("GET", f"{COMPUTE_DOMAINS}/namespaces/default/computedomains", ok=False)
    except Exception:  # noqa: BLE001 - until then a real server answers in plain text
        return False
