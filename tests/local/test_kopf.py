"""kopf, unchanged and in the same event loop as the whole cluster: handlers, status, finalizer, events, an index."""

import asyncio

import kopf

from meshwright_local.cluster import ClusterShape, LocalCluster
from meshwright_local.kube.resources import CRDS, EVENTS, PODS, Resource
from tests.patience import patient

RUNS = Resource("kopf.example.com", "v1", "runs", "Run")
FINALIZER = "kopf.example.com/finalizer"

DEFINITION = {
    "metadata": {"name": "runs.kopf.example.com"},
    "spec": {
        "group": "kopf.example.com",
        "scope": "Namespaced",
        "names": {"plural": "runs", "kind": "Run", "singular": "run", "listKind": "RunList"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {
                    "openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
                },
            }
        ],
    },
}  # fmt: skip


POD = {
    "metadata": {"name": "of-run", "labels": {"run": "one"}},
    "spec": {"containers": [{"name": "main", "image": "none", "command": ["sleep", "60"]}]},
}


def handlers(connection, calls):
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**_):
        return kopf.ConnectionInfo(
            server=connection.url, ca_data=connection.ca_pem.encode(), scheme="Bearer", token=connection.token
        )

    @kopf.on.startup(registry=registry)
    def configure(settings, **_):
        settings.persistence.finalizer = FINALIZER
        settings.posting.enabled = True

    @kopf.index("", "v1", "pods", id="pods_by_run", registry=registry)
    def pods_by_run(name, labels, **_):
        return {labels.get("run", ""): name}

    @kopf.on.create("kopf.example.com", "v1", "runs", id="created", registry=registry)
    async def created(name, spec, patch, body, **_):
        calls.append(("create", name))
        patch.status["phase"] = "Running"
        kopf.info(body, reason="Begun", message="The run has begun")
        return {"workers": spec["workers"]}

    @kopf.on.update("kopf.example.com", "v1", "runs", field="spec.workers", id="updated", registry=registry)
    async def updated(name, old, new, patch, pods_by_run, **_):
        calls.append(("update", name, old, new, sorted(pods_by_run.get(name, []))))
        patch.status["phase"] = "Scaled"

    @kopf.on.delete("kopf.example.com", "v1", "runs", registry=registry)
    async def deleted(name, **_):
        calls.append(("delete", name))

    return registry


async def until(look, what):
    async with asyncio.timeout(patient(90)):
        while True:
            if found := await look():
                return found
            await asyncio.sleep(0.02)


async def scenario(client):
    """What a user does to one object while the operator runs."""

    async def run_when(phase):
        async def look():
            found = await client.get(RUNS, "one", "default")
            return found if (found.get("status") or {}).get("phase") == phase else None

        return await until(look, phase)

    await client.create(RUNS, {"metadata": {"name": "one"}, "spec": {"workers": 2}}, "default")
    run = await run_when("Running")
    assert run["metadata"]["finalizers"] == [FINALIZER]
    assert run["status"]["created"] == {"workers": 2}
    await client.patch(RUNS, "one", {"spec": {"workers": 5}}, "default")
    await run_when("Scaled")
    await client.delete(RUNS, "one", "default")

    async def gone():
        return await client.find(RUNS, "one", "default") is None

    async def told():
        listed = (await client.list(EVENTS, "default")).items
        return any(item["reason"] == "Begun" and item["involvedObject"]["name"] == "one" for item in listed)

    await until(gone, "the finalizer is removed")
    await until(told, "the event is posted")


async def test_create_update_status_finalizer_and_delete():
    """kopf ends after the cluster: at its end it cancels every task that was begun in the loop since its start."""
    calls = []
    stop, ready = asyncio.Event(), asyncio.Event()
    operator = None
    try:
        async with LocalCluster(ClusterShape(racks=1, nodes_per_rack=1)) as cluster:
            await cluster.client.create(CRDS, DEFINITION)
            await cluster.client.create(PODS, POD, "default")
            registry = handlers(cluster.connection, calls)
            running = kopf.operator(
                registry=registry, standalone=True, namespaces=["default"], stop_flag=stop, ready_flag=ready
            )
            operator = asyncio.create_task(running)
            await asyncio.wait_for(ready.wait(), patient(90))
            await scenario(cluster.client)
    finally:
        stop.set()
        if operator is not None:
            await asyncio.wait([operator], timeout=patient(30))
    assert calls == [("create", "one"), ("update", "one", 2, 5, ["of-run"]), ("delete", "one")]
