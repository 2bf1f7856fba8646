"""Deployments over the API: rollouts of both kinds, what they say of themselves, what becomes of lost pods."""

import asyncio
import shutil
from datetime import datetime, timedelta

import pytest

from meshwright_local.kube.resources import DEPLOYMENTS, EVENTS, PODS, REPLICA_SETS
from tests.patience import patient

pytestmark = pytest.mark.asyncio(loop_scope="module")


def deployment(name, *, replicas=2, strategy=None, version="1", command="sleep 60", **spec):
    labels = {"app": name}
    container = {
        "name": "main",
        "image": "none",
        "command": ["sh", "-c", command],
        "env": [{"name": "VERSION", "value": version}],
    }
    pod = {"containers": [container], "terminationGracePeriodSeconds": 0}
    body = {"replicas": replicas, "selector": {"matchLabels": labels}, **spec}
    body["template"] = {"metadata": {"labels": labels}, "spec": pod}
    if strategy:
        body["strategy"] = strategy
    return {"metadata": {"name": name}, "spec": body}


async def settled(kit, name, replicas=2):
    """The deployment once `kubectl rollout status` would say that it is rolled out."""

    async def look():
        found = await kit.client.get(DEPLOYMENTS, name, "default")
        status = found.get("status") or {}
        counts = [status.get(field, 0) for field in ("replicas", "updatedReplicas", "availableReplicas")]
        current = status.get("observedGeneration", 0) >= found["metadata"]["generation"]
        return found if current and counts == [replicas] * 3 else None

    return await kit.until(look, 30.0, f"{name} is rolled out")


async def pods_of(kit, name):
    listed = (await kit.client.list(PODS, "default", label_selector=f"app={name}")).items
    return [pod for pod in listed if pod["status"].get("phase") not in ("Succeeded", "Failed")]


def versions(pods):
    return sorted(pod["spec"]["containers"][0]["env"][0]["value"] for pod in pods)


def conditions(found):
    return {item["type"]: (item["status"], item["reason"]) for item in found["status"]["conditions"]}


def since(found, kind):
    """When a condition became true."""
    item = next(item for item in found["status"]["conditions"] if item["type"] == kind)
    assert item["status"] == "True"
    return datetime.fromisoformat(item["lastTransitionTime"])


def image(version):
    container = {"name": "main", "env": [{"name": "VERSION", "value": version}]}
    return {"spec": {"template": {"spec": {"containers": [container]}}}}


async def patch(kit, name, body):
    kind = "application/strategic-merge-patch+json"
    await kit.client.patch(DEPLOYMENTS, name, body, "default", content_type=kind)


async def test_a_rollout_and_what_it_says(kit):
    await kit.client.create(DEPLOYMENTS, deployment("web"), "default")
    found = await settled(kit, "web")
    assert conditions(found) == {
        "Available": ("True", "MinimumReplicasAvailable"),
        "Progressing": ("True", "NewReplicaSetAvailable"),
    }
    assert found["metadata"]["annotations"]["deployment.kubernetes.io/revision"] == "1"
    (item,) = [
        entry
        for entry in (await kit.client.list(REPLICA_SETS, "default")).items
        if entry["metadata"]["ownerReferences"][0]["uid"] == found["metadata"]["uid"]
    ]
    assert item["status"]["readyReplicas"] == 2
    pods = await pods_of(kit, "web")
    assert {pod["metadata"]["ownerReferences"][0]["name"] for pod in pods} == {item["metadata"]["name"]}
    await kit.client.patch(DEPLOYMENTS, "web", {"spec": {"replicas": 3}}, "default")
    await settled(kit, "web", 3)
    await kit.client.patch(DEPLOYMENTS, "web", {"spec": {"replicas": 1}}, "default")
    await settled(kit, "web", 1)
    await kit.client.delete(DEPLOYMENTS, "web", "default", propagation="Background")

    async def collected():
        return not await pods_of(kit, "web") and not await kit.client.find(
            REPLICA_SETS, item["metadata"]["name"], "default"
        )

    await kit.until(collected, 20.0)


async def test_a_rolling_update_stays_within_its_limits(kit):
    limits = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    await kit.client.create(DEPLOYMENTS, deployment("rolled", strategy=limits), "default")
    await settled(kit, "rolled")
    await patch(kit, "rolled", image("2"))
    seen = []

    async def done():
        live = [pod for pod in await pods_of(kit, "rolled") if not pod["metadata"].get("deletionTimestamp")]
        ready = [
            pod
            for pod in live
            if any(item["type"] == "Ready" and item["status"] == "True" for item in pod["status"].get("conditions", ()))
        ]
        seen.append((len(live), len(ready)))
        return versions(live) == ["2", "2"] and len(ready) == 2

    await kit.until(done, 30.0)
    assert max(live for live, _ in seen) <= 3
    assert min(ready for _, ready in seen) >= 2
    found = await settled(kit, "rolled")
    assert found["metadata"]["annotations"]["deployment.kubernetes.io/revision"] == "2"
    # Back to the first template: its replica set is used again and becomes the newest.
    await patch(kit, "rolled", image("1"))

    async def back():
        return versions(await pods_of(kit, "rolled")) == ["1", "1"]

    await kit.until(back, 30.0)
    assert (await settled(kit, "rolled"))["metadata"]["annotations"]["deployment.kubernetes.io/revision"] == "3"
    await kit.client.delete(DEPLOYMENTS, "rolled", "default", propagation="Background")


async def test_recreate_never_runs_two_versions(kit):
    recreate = {"type": "Recreate"}
    body = deployment("single", replicas=1, strategy=recreate, command="trap 'sleep 0.5; exit 0' TERM; sleep 60 & wait")
    body["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 5
    await kit.client.create(DEPLOYMENTS, body, "default")
    await settled(kit, "single", 1)
    await patch(kit, "single", image("2"))

    async def replaced():
        found = versions(await pods_of(kit, "single"))
        assert len(found) <= 1, found
        return found == ["2"]

    await kit.until(replaced, 30.0)
    await settled(kit, "single", 1)
    await kit.client.delete(DEPLOYMENTS, "single", "default", propagation="Background")


async def test_a_lost_pod_is_replaced(kit):
    await kit.client.create(DEPLOYMENTS, deployment("kept", replicas=1), "default")
    await settled(kit, "kept", 1)
    (pod,) = await pods_of(kit, "kept")
    await kit.delete(pod["metadata"]["name"], grace_seconds=0)

    async def replaced():
        found = await pods_of(kit, "kept")
        return found and found[0]["metadata"]["uid"] != pod["metadata"]["uid"]

    await kit.until(replaced)
    await settled(kit, "kept", 1)
    await kit.client.delete(DEPLOYMENTS, "kept", "default", propagation="Background")


async def test_the_end_of_progress_is_reported(kit):
    body = deployment("stuck", replicas=1, progressDeadlineSeconds=2)
    body["spec"]["template"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": "nowhere"}
    await kit.client.create(DEPLOYMENTS, body, "default")

    async def told():
        found = await kit.client.get(DEPLOYMENTS, "stuck", "default")
        stated = (found.get("status") or {}).get("conditions")
        return stated and conditions(found).get("Progressing") == ("False", "ProgressDeadlineExceeded")

    await kit.until(told, 30.0)
    await kit.client.delete(DEPLOYMENTS, "stuck", "default", propagation="Background")


async def test_a_pod_counts_after_min_ready_seconds(kit):
    await kit.client.create(DEPLOYMENTS, deployment("slow", replicas=1, minReadySeconds=2), "default")
    found = await settled(kit, "slow", 1)
    (pod,) = await pods_of(kit, "slow")
    ready, available = since(pod, "Ready"), since(found, "Available")
    assert available - ready >= timedelta(seconds=2)
    await kit.client.delete(DEPLOYMENTS, "slow", "default", propagation="Background")


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on the PATH")
@pytest.mark.long
async def test_kubectl_follows_a_rollout(kit):
    """By default, the tests above look at what kubectl looks at."""

    async def kubectl(*words):
        process = await asyncio.create_subprocess_exec(
            "kubectl", "--kubeconfig", str(kit.cluster.kubeconfig), *words,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        out = (await asyncio.wait_for(process.communicate(), patient(60)))[0].decode()
        assert process.returncode == 0, out
        return out

    await kit.client.create(DEPLOYMENTS, deployment("typed"), "default")
    assert "successfully rolled out" in await kubectl("rollout", "status", "deployment/typed", "--timeout=200s")
    await kubectl("rollout", "restart", "deployment/typed")
    assert "successfully rolled out" in await kubectl("rollout", "status", "deployment/typed", "--timeout=200s")
    assert "2" in await kubectl("rollout", "history", "deployment/typed")
    await kubectl("rollout", "undo", "deployment/typed")
    assert "successfully rolled out" in await kubectl("rollout", "status", "deployment/typed", "--timeout=200s")
    await kubectl("wait", "--for=condition=Available", "deployment/typed", "--timeout=200s")
    await kubectl("delete", "deployment", "typed", "--cascade=foreground")
    assert not await pods_of(kit, "typed")


async def told(kit, name, text):
    async def look():
        listed = await kit.client.list(EVENTS, "default", field_selector=f"involvedObject.name={name}")
        return any(text in item["message"] for item in listed.items)

    await kit.until(look, what=f"an event {text!r}")


async def test_events_and_conditions_say_what_happens(kit):
    await kit.client.create(DEPLOYMENTS, deployment("said"), "default")
    found = await settled(kit, "said")
    (entry,) = (await kit.client.list(REPLICA_SETS, "default", label_selector="app=said")).items
    name = entry["metadata"]["name"]
    texts = {item["message"] for item in found["status"]["conditions"]}
    assert texts == {"Deployment has minimum availability.", f'ReplicaSet "{name}" has successfully progressed.'}
    await told(kit, "said", f"Scaled up replica set {name} from 0 to 2")
    await kit.client.patch(DEPLOYMENTS, "said", {"spec": {"replicas": 1}}, "default")
    await settled(kit, "said", 1)
    await told(kit, "said", f"Scaled down replica set {name} from 2 to 1")
    await kit.client.delete(DEPLOYMENTS, "said", "default")


async def test_a_paused_deployment_is_scaled_but_not_rolled_out(kit):
    await kit.client.create(DEPLOYMENTS, deployment("pauses", replicas=1), "default")
    await settled(kit, "pauses", 1)
    await kit.client.patch(DEPLOYMENTS, "pauses", {"spec": {"paused": True}}, "default")
    changed = deployment("pauses", replicas=2, version="2")["spec"]
    await kit.client.patch(DEPLOYMENTS, "pauses", {"spec": changed}, "default")

    async def scaled():
        found = await kit.client.get(DEPLOYMENTS, "pauses", "default")
        return found if found["status"].get("availableReplicas") == 2 else None

    found = await kit.until(scaled)
    assert conditions(found)["Progressing"] == ("Unknown", "DeploymentPaused")
    assert versions(await pods_of(kit, "pauses")) == ["1", "1"]
    await kit.client.patch(DEPLOYMENTS, "pauses", {"spec": {"paused": False}}, "default")
    await settled(kit, "pauses")
    assert versions(await pods_of(kit, "pauses")) == ["2", "2"]
    await kit.client.delete(DEPLOYMENTS, "pauses", "default")


async def test_the_youngest_pod_goes_first_unless_another_costs_less(kit):
    await kit.client.create(DEPLOYMENTS, deployment("shrinks", replicas=1), "default")
    await settled(kit, "shrinks", 1)
    (first,) = await pods_of(kit, "shrinks")
    await asyncio.sleep(1.1)  # times of readiness are whole seconds
    await kit.client.patch(DEPLOYMENTS, "shrinks", {"spec": {"replicas": 2}}, "default")
    await settled(kit, "shrinks", 2)
    await kit.client.patch(DEPLOYMENTS, "shrinks", {"spec": {"replicas": 1}}, "default")
    await settled(kit, "shrinks", 1)
    (left,) = await pods_of(kit, "shrinks")
    assert left["metadata"]["uid"] == first["metadata"]["uid"]
    await kit.client.patch(DEPLOYMENTS, "shrinks", {"spec": {"replicas": 2}}, "default")
    await settled(kit, "shrinks", 2)
    cheap = {"metadata": {"annotations": {"controller.kubernetes.io/pod-deletion-cost": "-1"}}}
    await kit.client.patch(PODS, first["metadata"]["name"], cheap, "default")
    await kit.client.patch(DEPLOYMENTS, "shrinks", {"spec": {"replicas": 1}}, "default")
    await settled(kit, "shrinks", 1)
    (left,) = await pods_of(kit, "shrinks")
    assert left["metadata"]["uid"] != first["metadata"]["uid"]
    await kit.client.delete(DEPLOYMENTS, "shrinks", "default")
