"""Controllers over the API: garbage, namespaces, claims."""

import asyncio
import uuid

import pytest

from meshwright_local.kube.client import ApiError
from meshwright_local.kube.resources import CLAIMS, CONFIG_MAPS, CRDS, NAMESPACES, PODS, SECRETS, VOLUMES, Resource

pytestmark = pytest.mark.asyncio(loop_scope="module")

# kube-controller-manager learns of new kinds every 30 s.
SLOW = 75.0
WIDGETS = Resource("example.com", "v1", "widgets", "Widget")


def owned_by(*owners, block=True):
    return [
        {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
            "blockOwnerDeletion": block,
        }
        for owner in owners
    ]


async def make(kit, name, *owners, block=True, resource=CONFIG_MAPS, **metadata):
    body = {"metadata": {"name": name, "ownerReferences": owned_by(*owners, block=block), **metadata}}
    return await kit.client.create(resource, body, kit.namespace)


async def seen(kit, resource=CONFIG_MAPS):
    """Wait until the collector has seen all objects of a resource: it collects what comes after them."""
    absent = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "absent", "uid": str(uuid.uuid4())}}
    await make(kit, "canary", absent, resource=resource)
    await gone(kit, "canary", resource)


async def gone(kit, name, resource=CONFIG_MAPS, seconds=10.0):
    async def look():
        return await kit.client.find(resource, name, kit.namespace) is None

    await kit.until(look, seconds, what=f"{name} is collected")


@pytest.mark.parametrize("policy", ["Background", "Foreground"])
async def test_dependents_go_with_their_owner(kit, policy):
    name = policy.lower()
    owner = await make(kit, f"{name}-owner")
    child = await make(kit, f"{name}-child", owner, resource=SECRETS)
    await make(kit, f"{name}-grandchild", child)
    await seen(kit)
    await seen(kit, SECRETS)
    await kit.client.delete(CONFIG_MAPS, f"{name}-owner", "default", propagation=policy)
    await gone(kit, f"{name}-child", SECRETS)
    await gone(kit, f"{name}-grandchild")
    await gone(kit, f"{name}-owner")


async def test_foreground_keeps_the_owner_until_blockers_are_gone(kit):
    owner = await make(kit, "patient")
    await make(kit, "holding", owner, finalizers=["example.com/hold"])
    await seen(kit)
    await kit.client.delete(CONFIG_MAPS, "patient", "default", propagation="Foreground")

    async def dying():
        held = await kit.client.get(CONFIG_MAPS, "holding", "default")
        return held["metadata"].get("deletionTimestamp")

    await kit.until(dying)
    assert await kit.client.find(CONFIG_MAPS, "patient", "default")
    await kit.client.patch(CONFIG_MAPS, "holding", {"metadata": {"finalizers": None}}, "default")
    await gone(kit, "holding")
    await gone(kit, "patient")


async def test_orphans_stay_without_the_reference(kit):
    owner = await make(kit, "leaving")
    await make(kit, "staying", owner)
    await seen(kit)
    await kit.client.delete(CONFIG_MAPS, "leaving", "default", propagation="Orphan")
    await gone(kit, "leaving")
    staying = await kit.client.get(CONFIG_MAPS, "staying", "default")
    assert not staying["metadata"].get("ownerReferences")


async def test_one_solid_owner_is_enough(kit):
    first, second = await make(kit, "first"), await make(kit, "second")
    await make(kit, "shared", first, second)
    await kit.client.delete(CONFIG_MAPS, "first", "default")

    async def freed():
        shared = await kit.client.get(CONFIG_MAPS, "shared", "default")
        return [owner["name"] for owner in shared["metadata"]["ownerReferences"]] == ["second"]

    await kit.until(freed)
    await kit.client.delete(CONFIG_MAPS, "second", "default")
    await gone(kit, "shared")


async def test_an_owner_of_another_uid_is_not_an_owner(kit):
    owner = await make(kit, "again")
    await kit.client.delete(CONFIG_MAPS, "again", "default")
    await make(kit, "again")
    await make(kit, "late", owner)
    await gone(kit, "late")


async def test_pods_of_a_custom_resource(kit):
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    definition = {
        "metadata": {"name": "widgets.example.com"},
        "spec": {
            "group": "example.com",
            "scope": "Namespaced",
            "names": {"plural": "widgets", "kind": "Widget", "singular": "widget", "listKind": "WidgetList"},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}],
        },
    }
    await kit.client.create(CRDS, definition)

    async def served():
        try:
            return await kit.client.create(WIDGETS, {"metadata": {"name": "w"}}, "default")
        except ApiError:
            return None

    widget = await kit.until(served)
    await kit.pod("w-pod", "sleep 60", meta={"ownerReferences": owned_by(widget)})
    await kit.running("w-pod")
    await kit.client.delete(WIDGETS, "w", "default")
    await kit.vanished("w-pod", SLOW)
    # The definition itself takes its objects, and they their dependents, along.
    widget = await kit.client.create(WIDGETS, {"metadata": {"name": "x"}}, "default")
    await make(kit, "x-child", widget)
    await seen(kit)
    await seen(kit, WIDGETS)
    await kit.client.delete(CRDS, "widgets.example.com")
    await gone(kit, "x-child", seconds=SLOW)


async def test_namespace_deletion_takes_everything(kit):
    await kit.client.create(NAMESPACES, {"metadata": {"name": "team"}})
    body = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1}
    container = {"name": "main", "image": "none", "command": ["sleep", "60"]}
    await kit.client.create(PODS, {"metadata": {"name": "p"}, "spec": {**body, "containers": [container]}}, "team")
    held = {"metadata": {"name": "held", "finalizers": ["example.com/hold"]}}
    await kit.client.create(CONFIG_MAPS, held, "team")

    async def running():
        return (await kit.client.get(PODS, "p", "team"))["status"].get("phase") == "Running"

    await kit.until(running)
    await kit.client.delete(NAMESPACES, "team")

    async def told():
        namespace = await kit.client.get(NAMESPACES, "team")
        messages = [item.get("message", "") for item in namespace["status"].get("conditions") or ()]
        pods = (await kit.client.list(PODS, "team")).items
        return not pods and any("configmaps. has 1" in message for message in messages)

    await kit.until(told, SLOW)
    await kit.client.patch(CONFIG_MAPS, "held", {"metadata": {"finalizers": None}}, "team")

    async def empty():
        return await kit.client.find(NAMESPACES, "team") is None

    await kit.until(empty, SLOW)


def claim(name, **spec):
    storage = {"requests": {"storage": "1Gi"}}
    return {"metadata": {"name": name}, "spec": {"accessModes": ["ReadWriteMany"], "resources": storage, **spec}}


async def bound(kit, name):
    async def look():
        found = await kit.client.get(CLAIMS, name, "default")
        return found if (found.get("status") or {}).get("phase") == "Bound" else None

    return await kit.until(look, what=f"{name} is bound")


async def test_a_claim_is_bound_and_shared_between_nodes(kit):
    kit.needs_own_nodes()
    await kit.client.create(CLAIMS, claim("shared"), "default")
    made = await bound(kit, "shared")
    assert made["status"]["capacity"] == {"storage": "1Gi"}
    volume = await kit.client.get(VOLUMES, made["spec"]["volumeName"])
    assert volume["status"]["phase"] == "Bound"
    spec = {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "shared"}}]}
    mount = {"volumeMounts": [{"name": "v", "mountPath": "/data"}], "env": [{"name": "F", "value": "/data/sub/file"}]}
    script = 'mkdir -p "$(dirname "$F")"; echo there > "$F"'
    await kit.pod("writer", script, spec={**spec, "nodeSelector": {"kubernetes.io/hostname": "rack0-node0"}}, **mount)
    assert (await kit.ended("writer"))["status"]["phase"] == "Succeeded"
    await kit.pod(
        "reader", 'cat "$F"', spec={**spec, "nodeSelector": {"kubernetes.io/hostname": "rack1-node1"}}, **mount
    )
    assert kit.log_of(await kit.ended("reader")) == "there\n"


async def test_a_claim_in_use_is_retained_and_its_data_is_deleted_with_it(kit):
    kit.needs_own_nodes()
    await kit.client.create(CLAIMS, claim("busy"), "default")
    spec = {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "busy"}}]}
    await kit.pod("user", "sleep 60", spec=spec)
    await kit.running("user")
    made = await bound(kit, "busy")
    directory = kit.cluster.directory / "volumes" / made["spec"]["volumeName"]
    assert directory.is_dir()
    await kit.client.delete(CLAIMS, "busy", "default")
    await asyncio.sleep(0.2)
    assert (await kit.client.get(CLAIMS, "busy", "default"))["metadata"]["deletionTimestamp"]
    assert directory.is_dir()
    await kit.delete("user", grace_seconds=0)
    await gone(kit, "busy", CLAIMS)

    async def reclaimed():
        return not directory.exists() and await kit.client.find(VOLUMES, made["spec"]["volumeName"]) is None

    await kit.until(reclaimed)


async def test_a_claim_of_another_class_is_left_alone(kit):
    await kit.client.create(CLAIMS, claim("foreign", storageClassName="fast"), "default")
    await kit.client.create(CLAIMS, claim("by-hand", volumeName="made-by-hand"), "default")
    await kit.client.create(CLAIMS, claim("ours", storageClassName="local-directory"), "default")
    await bound(kit, "ours")
    for name in ("foreign", "by-hand"):
        left = await kit.client.get(CLAIMS, name, "default")
        assert (left.get("status") or {}).get("phase") in (None, "Pending")
