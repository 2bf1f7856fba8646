"""Nodes: what they say of themselves, how their loss is noticed, and what becomes of their pods."""

import asyncio

import pytest

from meshwright_local.controllers.node_lifecycle import NodeTimes
from meshwright_local.kube.resources import LEASES, NODES, PODS

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def times() -> NodeTimes:
    """Short enough to lose a node, and long enough for a heartbeat that is late to keep the pods of the others."""
    return NodeTimes(renew=0.3, heartbeat=2.0, tolerate=3.0, check=0.2)


def ready(node):
    return next(item["status"] for item in node["status"]["conditions"] if item["type"] == "Ready")


async def until_ready(kit, name, value, seconds=10.0):
    async def look():
        return ready(await kit.client.get(NODES, name)) == value

    await kit.until(look, seconds, f"{name} is Ready={value}")


async def test_registration(kit):
    nodes = {node["metadata"]["name"]: node for node in (await kit.client.list(NODES)).items}
    assert sorted(nodes) == ["rack0-node0", "rack0-node1", "rack1-node0", "rack1-node1"]
    node = nodes["rack1-node0"]
    labels = node["metadata"]["labels"]
    assert labels["kubernetes.io/hostname"] == "rack1-node0"
    assert labels["network.topology.nvidia.com/leaf"] == "rack1"
    assert labels["nvidia.com/gpu.product"] == "Simulated-GPU"
    assert node["status"]["allocatable"]["nvidia.com/gpu"] == "2"
    assert ready(node) == "True"
    domains = {item["metadata"]["labels"]["network.topology.nvidia.com/accelerator"] for item in nodes.values()}
    assert len(domains) == 4


async def test_heartbeats_renew_the_lease_only(kit):
    async def renewed():
        lease = await kit.client.get(LEASES, "rack0-node0", "kube-node-lease")
        return lease["spec"]["renewTime"]

    async def renewed_alone():
        before, node = await renewed(), await kit.client.get(NODES, "rack0-node0")

        async def later():
            return await renewed() > before

        await kit.until(later)
        again = await kit.client.get(NODES, "rack0-node0")
        return again["status"] == node["status"]

    # On a busy machine a heartbeat may be so late that the node is marked once.
    await kit.until(renewed_alone)


async def test_a_lost_node_is_noticed_and_comes_back(kit):
    pin = {"nodeSelector": {"kubernetes.io/hostname": "rack1-node1"}}
    await kit.pod("lost", "sleep 60", spec=pin)
    await kit.running("lost")
    tolerant = {"key": "node.kubernetes.io/unreachable", "operator": "Exists"}
    await kit.pod("faithful", "sleep 60", spec={**pin, "tolerations": [tolerant]})
    await kit.running("faithful")
    await kit.cluster.nodes["rack1-node1"].power_off()
    await until_ready(kit, "rack1-node1", "Unknown")

    async def tainted():
        node = await kit.client.get(NODES, "rack1-node1")
        return {taint["effect"] for taint in node["spec"].get("taints") or ()} == {"NoSchedule", "NoExecute"}

    await kit.until(tainted)
    await kit.pod_when("lost", lambda pod: pod["metadata"].get("deletionTimestamp"))
    await kit.pod("avoids", "true", spec=pin)
    pod = await kit.pod_when("avoids", lambda pod: pod["status"].get("conditions"))
    # Which taint it is, schedulers of some releases say and others do not.
    assert "1 node(s) had untolerated taint" in pod["status"]["conditions"][0]["message"]
    assert not (await kit.client.get(PODS, "faithful", "default"))["metadata"].get("deletionTimestamp")

    await kit.cluster.nodes["rack1-node1"].recover()
    await until_ready(kit, "rack1-node1", "True")
    await kit.vanished("lost")
    pod = await kit.ended("faithful")
    terminated = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    assert terminated["reason"] == "ContainerStatusUnknown"
    await kit.ended("avoids")


async def test_containers_that_may_restart_do_after_their_node_did(kit):
    pin = {"nodeSelector": {"kubernetes.io/hostname": "rack0-node1"}, "restartPolicy": "Always"}
    await kit.pod("service", "sleep 60", spec=pin)
    await kit.running("service")
    await kit.cluster.nodes["rack0-node1"].power_off()
    await kit.cluster.nodes["rack0-node1"].recover()

    def restarted(pod):
        status = pod["status"]["containerStatuses"][0]
        return status["restartCount"] == 1 and "running" in status["state"]

    await kit.pod_when("service", restarted)
    await kit.delete("service", grace_seconds=0)


async def test_pods_of_a_deleted_node_are_removed(kit, request):
    # The real pod garbage collector looks every 20 s, and only at nodes that were gone for 40 s.
    patience = 10 if request.config.getoption("--cluster") == "embedded" else 100
    await kit.pod("stranded", "sleep 60", spec={"nodeSelector": {"kubernetes.io/hostname": "rack1-node0"}})
    await kit.running("stranded")
    await kit.cluster.nodes["rack1-node0"].power_off()
    await kit.client.delete(NODES, "rack1-node0")
    await kit.vanished("stranded", patience)
    await kit.cluster.nodes["rack1-node0"].recover()


async def test_a_deleted_node_registers_again(kit):
    await kit.client.delete(NODES, "rack0-node0")

    async def back():
        node = await kit.client.find(NODES, "rack0-node0")
        return node is not None and bool(node.get("status", {}).get("conditions"))

    await kit.until(back)


async def test_taint_eviction(kit):
    await kit.pod("evicted", "sleep 60", spec={"nodeSelector": {"kubernetes.io/hostname": "rack0-node0"}})
    await kit.running("evicted")
    taint = {"key": "example.com/drain", "effect": "NoExecute"}
    await kit.client.patch(NODES, "rack0-node0", {"spec": {"taints": [taint]}})
    await kit.vanished("evicted")
    await kit.client.patch(NODES, "rack0-node0", {"spec": {"taints": None}})
    await asyncio.sleep(0)
