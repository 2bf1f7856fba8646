"""Runtime classes, and what they add to pods."""

import pytest
import pytest_asyncio

CLASSES = "/apis/node.k8s.io/v1/runtimeclasses"
FORBIDDEN = 'pods "p" is forbidden: '
GPU = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
ZONE = {"key": "zone", "operator": "Equal", "value": "a"}


def runtime_class(name, **fields):
    return {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}, **fields}


@pytest_asyncio.fixture
async def kata(api):
    """A class with an overhead and scheduling, once pods can have it."""
    name = f"kata-{api.namespace}"
    overhead = {"podFixed": {"cpu": "250m", "memory": "120Mi"}}
    scheduling = {"nodeSelector": {"kata": "yes"}, "tolerations": [GPU, ZONE]}
    body = runtime_class(name, handler="kata", overhead=overhead, scheduling=scheduling)
    code, made = await api.call("POST", CLASSES, body)
    assert code == 201, made
    await api.until(201, "POST", f"{api.pods}?dryRun=All", api.pod("probe", runtimeClassName=name))
    yield name
    await api.call("DELETE", f"{CLASSES}/{name}")


async def admitted(api, **spec):
    code, pod = await api.call("POST", api.pods, api.pod("p", **spec))
    assert code == 201, pod
    own = [one for one in pod["spec"].get("tolerations") or () if "node.kubernetes.io" not in one.get("key", "")]
    return {**pod["spec"], "tolerations": own}


async def rejected(api, **spec):
    code, status = await api.call("POST", api.pods, api.pod("p", **spec))
    assert (code, status["reason"]) == (403, "Forbidden")
    assert status["message"].startswith(FORBIDDEN)
    return status["message"].removeprefix(FORBIDDEN)


async def test_a_pod_gets_what_its_class_says(api, kata):
    spec = await admitted(api, runtimeClassName=kata, nodeSelector={"a": "b", "kata": "yes"})
    assert spec["overhead"] == {"cpu": "250m", "memory": "120Mi"}
    assert spec["nodeSelector"] == {"a": "b", "kata": "yes"}
    assert spec["tolerations"] == [GPU, ZONE]


async def test_a_toleration_that_another_includes_is_left_out(api, kata):
    wide = {"key": "zone", "operator": "Exists"}
    narrow = {"key": "gpu", "operator": "Equal", "value": "x", "effect": "NoSchedule"}
    spec = await admitted(api, runtimeClassName=kata, tolerations=[wide, narrow])
    assert spec["tolerations"] == [wide, GPU]


async def test_an_equal_overhead_is_accepted(api, kata):
    spec = await admitted(api, runtimeClassName=kata, overhead={"cpu": "0.25", "memory": "120Mi"})
    assert spec["overhead"] == {"cpu": "250m", "memory": "120Mi"}


async def test_what_contradicts_the_class_is_rejected(api, kata):
    text = "pod rejected: Pod's Overhead doesn't match RuntimeClass's defined Overhead"
    assert await rejected(api, runtimeClassName=kata, overhead={"cpu": "1"}) == text
    text = "conflict: runtimeClass.scheduling.nodeSelector[kata] = yes; pod.spec.nodeSelector[kata] = no"
    assert await rejected(api, runtimeClassName=kata, nodeSelector={"kata": "no"}) == text


async def test_a_class_that_does_not_exist(api):
    assert await rejected(api, runtimeClassName="nowhere") == 'pod rejected: RuntimeClass "nowhere" not found'
    text = "pod rejected: Pod Overhead set without corresponding RuntimeClass defined Overhead"
    assert await rejected(api, overhead={"cpu": "1"}) == text


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "handler"),
        ({"handler": "A_b"}, "handler"),
        ({"handler": "h", "overhead": {"podFixed": {"cpu": "-1"}}}, "overhead.limits[cpu]"),
        ({"handler": "h", "scheduling": {"tolerations": [GPU, GPU]}}, "scheduling.tolerations[1]"),
        ({"handler": "h", "scheduling": {"nodeSelector": {"a b": "c"}}}, "scheduling.nodeSelector"),
    ],
)
async def test_classes_are_checked(api, fields, field):
    code, status = await api.call("POST", CLASSES, runtime_class("wrong", **fields))
    assert (code, [cause["field"] for cause in status["details"]["causes"]]) == (422, [field])


async def test_the_handler_stays(api, kata):
    kind = "application/merge-patch+json"
    code, status = await api.call("PATCH", f"{CLASSES}/{kata}", {"handler": "other"}, kind)
    assert (code, status["details"]["causes"][0]["field"]) == (422, "handler")
