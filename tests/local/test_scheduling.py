"""The scheduler over the API: who is bound where, and who waits and why."""

import asyncio

import pytest

from meshwright_local.kube.resources import CLAIMS, NODES, PODS, Resource

pytestmark = pytest.mark.asyncio(loop_scope="module")


def gpus(count):
    return {"limits": {"nvidia.com/gpu": str(count)}, "requests": {"nvidia.com/gpu": str(count)}}


def scheduled(pod):
    return next((c for c in pod["status"].get("conditions") or () if c["type"] == "PodScheduled"), None)


async def clear(kit):
    for pod in (await kit.client.list(PODS, "default")).items:
        await kit.delete(pod["metadata"]["name"], grace_seconds=0)

    async def empty():
        return not (await kit.client.list(PODS, "default")).items

    await kit.until(empty)


async def test_gated_pods_wait_until_every_gate_is_gone(kit):
    await kit.pod("gated", "true", spec={"schedulingGates": [{"name": "a"}, {"name": "b"}]})
    pod = await kit.pod_when("gated", scheduled)
    condition = scheduled(pod)
    assert (condition["status"], condition["reason"]) == ("False", "SchedulingGated")
    await kit.client.patch(PODS, "gated", {"spec": {"schedulingGates": [{"name": "b"}]}}, "default")
    await asyncio.sleep(0.2)
    pod = await kit.client.get(PODS, "gated", "default")
    assert not pod["spec"].get("nodeName")
    await kit.client.patch(PODS, "gated", {"spec": {"schedulingGates": None}}, "default")
    await kit.ended("gated")


async def test_pinned_by_name(kit):
    terms = [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["rack1-node0"]}]}]
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    await kit.pod("pinned", "true", spec={"affinity": affinity})
    pod = await kit.ended("pinned")
    assert pod["spec"]["nodeName"] == "rack1-node0"


async def test_gpus_are_counted_and_freed(kit):
    await clear(kit)
    for index in range(4):
        await kit.pod(f"full-{index}", "sleep 60", resources=gpus(2))
    pods = [await kit.running(f"full-{index}") for index in range(4)]
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 4
    await kit.pod("fifth", "true", resources=gpus(1))
    pod = await kit.pod_when("fifth", scheduled)
    condition = scheduled(pod)
    assert condition["reason"] == "Unschedulable"
    # kube-scheduler goes on to say what preemption could do; ours does not preempt.
    assert condition["message"].startswith("0/4 nodes are available: 4 Insufficient nvidia.com/gpu.")

    async def told():
        return "FailedScheduling" in await kit.events_of("fifth")

    await kit.until(told)
    await kit.delete("full-2", grace_seconds=0)
    pod = await kit.ended("fifth")
    assert pod["spec"]["nodeName"] == pods[2]["spec"]["nodeName"]
    await clear(kit)


async def test_priority_goes_first(kit):
    await clear(kit)
    for index in range(4):
        await kit.pod(f"block-{index}", "sleep 60", resources=gpus(2))
        await kit.running(f"block-{index}")
    classes = Resource("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", namespaced=False)
    await kit.client.create(classes, {"metadata": {"name": "urgent"}, "value": 100})
    await kit.pod("low", "sleep 60", resources=gpus(2))
    await kit.pod("high", "true", resources=gpus(2), spec={"priorityClassName": "urgent"})
    await kit.pod_when("high", scheduled)
    await kit.delete("block-0", grace_seconds=0)
    assert (await kit.ended("high"))["status"]["phase"] == "Succeeded"
    await kit.running("low")
    await clear(kit)


async def test_cordon_and_uncordon(kit):
    await kit.client.patch(NODES, "rack0-node1", {"spec": {"unschedulable": True}})
    await kit.pod("cordoned", "true", spec={"nodeSelector": {"kubernetes.io/hostname": "rack0-node1"}})
    pod = await kit.pod_when("cordoned", scheduled)
    assert "1 node(s) were unschedulable" in scheduled(pod)["message"]

    async def taints():
        found = (await kit.client.get(NODES, "rack0-node1"))["spec"].get("taints") or ()
        return [(taint["key"], taint["effect"]) for taint in found]

    async def tainted():
        return await taints() == [("node.kubernetes.io/unschedulable", "NoSchedule")]

    async def clean():
        return await taints() == []

    await kit.until(tainted, what="the node has the taint of a cordoned one")
    await kit.client.patch(NODES, "rack0-node1", {"spec": {"unschedulable": None}})
    await kit.ended("cordoned")
    await kit.until(clean, what="the taint is gone")


async def test_a_pod_waits_for_its_claim(kit):
    """A pod whose claim does not exist is unschedulable. It does not wait on a node, where others need the GPUs."""
    spec = {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "late"}}]}
    await kit.pod("claims", "true", spec=spec)
    condition = scheduled(await kit.pod_when("claims", scheduled))
    assert (condition["status"], condition["reason"]) == ("False", "Unschedulable")
    assert condition["message"].startswith('0/4 nodes are available: persistentvolumeclaim "late" not found.')
    size = {"requests": {"storage": "1Gi"}}
    claim = {"metadata": {"name": "late"}, "spec": {"accessModes": ["ReadWriteMany"], "resources": size}}
    await kit.client.create(CLAIMS, claim, "default")
    await kit.ended("claims", 30.0)
    await kit.delete("claims", grace_seconds=0)
    await kit.client.delete(CLAIMS, "late", "default")


async def test_another_scheduler_is_left_alone(kit):
    await kit.pod("foreign", "true", spec={"schedulerName": "somebody-else"})
    await kit.pod("own", "true")
    await kit.ended("own")
    pod = await kit.client.get(PODS, "foreign", "default")
    assert not pod["spec"].get("nodeName")
    assert scheduled(pod) is None
