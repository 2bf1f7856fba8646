"""Objects of any shape: many malformed jobs, and pods, nodes and a lease that nobody would write on purpose.

The jobs are stored while a CRD without a schema is installed, as an older release or a bad upgrade could leave them.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from meshwright.api import labels
from meshwright.api.objects import KubeObject
from tests import definition
from tests.operator.agents import Kubelet
from tests.operator.conftest import Settled, StartOperator
from tests.operator.support import JOBS, MERGE, PODS, Api, condition, job, node, put_node, until
from tests.randomness import seeds
from tests.tiers import mostly_long

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
NAME = "paralleltrainingjobs.meshwright.dev"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
JUNK: tuple[Any, ...] = (
    *(None, True, -1, 0, 10**15, 1.5, "", "x" * 5000, "1e999", "\u2028"),
    *([], [[]], [None, 1, {}], {}, {"": ""}, {"a": {"b": [1]}}, {"tensor": {"size": "two"}}),
)


async def define(api: Api, *, strict: bool) -> None:
    """Installs the real CRD, or one that takes everything."""
    version = definition.committed()["spec"]["versions"][0]
    if not strict:
        anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        version = {
            **{key: version[key] for key in ("name", "served", "storage")},
            "schema": {"openAPIV3Schema": anything},
            "subresources": {"status": {}},
        }
    await api.call("PATCH", f"{DEFINITIONS}/{NAME}", {"spec": {"versions": [version]}}, kind=MERGE)


def malformed(number: int, seed: int) -> KubeObject:
    """A job with junk somewhere: in place of the spec or status, of one field, or deep inside of one."""
    chance = random.Random(10_000 * seed + number)
    body: KubeObject = {**job(f"bad{number}"), "status": {"observedGeneration": 1}}
    places = [("spec",), ("status",), *(("spec", key) for key in body["spec"])]
    places += [
        ("spec", key, inner) for key, value in body["spec"].items() if isinstance(value, dict) for inner in value
    ]
    places += [("status", key) for key in ("conditions", "mesh", "placement", "plan", "restarts", "step", "checkpoint")]
    for place in chance.sample(places, chance.randint(1, 3)):
        target: Any = body
        for key in place[:-1]:
            target = target.get(key) if isinstance(target, dict) else None
        if isinstance(target, dict):
            target[place[-1]] = copy.deepcopy(chance.choice(JUNK))
    return body


def odd_pod(name: str, **metadata: Any) -> KubeObject:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {labels.LABEL_JOB: "good"}, **metadata},
        "spec": {"containers": [{"name": "c", "image": "i"}], "schedulingGates": [{"name": "example.com/never"}]},
    }


async def store_malformed(api: Api, count: int, seed: int) -> int:
    """As many malformed jobs as the server takes without a schema."""
    await define(api, strict=False)

    async def loose() -> bool:
        answer = await api.call("POST", JOBS, {**malformed(0, seed), "spec": {"replicas": "many"}}, ok=False)
        return answer.get("kind") == labels.KIND

    await until(loose, "the loose CRD is in force", 30)
    stored = 1
    for number in range(1, count):
        body = malformed(number, seed)
        created = await api.call("POST", JOBS, {k: v for k, v in body.items() if k != "status"}, ok=False)
        if created.get("kind") != labels.KIND:
            continue
        stored += 1
        await api.call("PATCH", f"{JOBS}/bad{number}/status", {"status": body["status"]}, kind=MERGE, ok=False)
    await define(api, strict=True)

    async def strict() -> bool:
        answer = await api.call("POST", f"{JOBS}?dryRun=All", job("probe", replicas=-1), ok=False)
        return answer.get("code") == 422

    await until(strict, "the real CRD is in force again", 30)
    return stored


async def store_oddities(api: Api) -> None:
    """Pods, nodes and a lease as nobody would write them."""
    reference = {"apiVersion": "v1", "kind": "Node", "name": "n0", "uid": "nobody", "controller": True}
    for body in (
        odd_pod("good"),
        odd_pod("good-w99999-999999999", ownerReferences=[reference]),
        odd_pod("good-wx-0", annotations={"meshwright.dev/ranks": "\u0000"[1:] + "x" * 2000}),
        odd_pod("other-w0-0"),
        odd_pod("good-w1-0.5"),
    ):
        await api.create(PODS, body)
    for name, status in (
        ("odd0", {}),
        ("odd1", {"conditions": []}),
        ("odd2", {"allocatable": {"nvidia.com/gpu": "1500m"}, "conditions": [{"type": "Ready", "status": "Unknown"}]}),
        ("odd3", {"allocatable": {"nvidia.com/gpu": "999999999999"}}),
    ):
        bare = {**node(name, ""), "status": status}
        bare["metadata"]["labels"] = {"network.topology.nvidia.com/leaf": "", "nvidia.com/gpu.memory": "much"}
        await api.call("POST", "/api/v1/nodes", bare, ok=False)
        await api.call("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, kind=MERGE, ok=False)
    lease = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "meshwright-operator"},
        "spec": {"holderIdentity": "ghost", "leaseDurationSeconds": 1},
    }
    await api.create(LEASE, lease)


def _dicts(value: object) -> list[KubeObject]:
    return [item for item in value if isinstance(item, dict) and "type" in item] if isinstance(value, list) else []


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("count", "seed"), mostly_long([*((25, seed) for seed in seeds(1)), (100, 0)], lambda case: case[0] == 25)
)
async def test_malformed_objects_harm_nobody_but_themselves(
    count: int, seed: int, api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    stored = await store_malformed(api, count, seed)
    assert stored >= count * 0.9, "the server refused too many for this to be a test"
    await store_oddities(api)
    await put_node(api, node("roomy", "r9", 1024))  # junk in status alone leaves a job that may well run
    operator = await start_operator()
    await api.create(JOBS, job("good"))
    status = await settled("good")
    assert status["readyRanks"] == "8/8"
    for agent in kubelet.of("good"):
        await agent.finish()

    async def complete() -> bool:
        return condition(await api.status("good"), "Complete").get("status") == "True"

    await until(complete, "the good job completes", 60)
    assert operator.failure is None

    # What a malformed job says of itself: by an event alone where the server takes no status for what is stored.
    async def told() -> bool:
        events = await api.items("/api/v1/namespaces/default/events")
        by_event = {e["involvedObject"]["name"] for e in events if e["reason"] == "InvalidSpec"}
        jobs = {item["metadata"]["name"]: item.get("status") for item in await api.items(JOBS)}
        statuses = {name: status if isinstance(status, dict) else {} for name, status in jobs.items()}
        listed = {name: {"conditions": _dicts(s.get("conditions"))} for name, s in statuses.items()}
        by_status = {name for name, s in listed.items() if condition(s, "Stalled").get("reason") == "InvalidSpec"}
        return len(by_status | by_event) > stored / 2 and bool(by_event - by_status)

    await until(told, "most malformed jobs say what is wrong with them", 60)
    await api.delete(f"{JOBS}/bad1")
    await api.create(JOBS, job("bad1"))
    assert operator.failure is None
