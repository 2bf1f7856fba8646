"""The pure parts of the node agent: environment, fields, paths, names, addresses, logs, probes' thresholds."""

from types import SimpleNamespace
from typing import Any

import pytest

from meshwright_local.nodeagent import volumes
from meshwright_local.nodeagent.network import hosts_files
from meshwright_local.nodeagent.network.addresses import ClusterNetwork, NoAddressError, PodAddresses
from meshwright_local.nodeagent.node import NodeSpec
from meshwright_local.nodeagent.runtime.environment import downward, expand
from meshwright_local.nodeagent.runtime.mount_namespace import Mount
from meshwright_local.nodeagent.sandbox import PodSpecError
from meshwright_local.nodeagent.server.logs import LogOptions


@pytest.mark.parametrize(
    ("value", "real"),
    [
        ("/data", "/real/d"),
        ("/data/", "/real/d"),
        ("/data/x/y", "/real/d/x/y"),
        ("/data/deep", "/real/deep"),
        ("/data/deep/z", "/real/deep/z"),
        ("/database", "/database"),
        ("--out=/data/x", "--out=/real/d/x"),
        ("OUT=/data/x", "OUT=/real/d/x"),
        ("a /data/x", "a /data/x"),
        ("http://h/data/x", "http://h/data/x"),
        ("", ""),
    ],
)
def test_paths_of_a_container_without_a_view(value, real):
    mounts = [Mount("/real/d", "/data"), Mount("/real/deep", "/data/deep")]
    assert volumes.rewrite(value, mounts) == real


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(B)", "x1y2"),
        ("$(C)", "$(C)"),
        ("$$(A)", "$(A)"),
        ("$A", "$A"),
        ("$$", "$"),
        ("$(A", "$(A"),
    ],
)
def test_expansion(text, result):
    assert expand(text, {"A": "1", "B": "2"}) == result


POD = {
    "metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": {"a": 'x"y'}},
    "spec": {"containers": [{"name": "c", "resources": {"limits": {"cpu": "1500m", "memory": "1Gi"}}}]},
}


def sandbox() -> Any:
    spec = NodeSpec("node", capacity={"cpu": "64", "nvidia.com/gpu": "2"})
    return SimpleNamespace(pod=POD, ip="127.1.1.1", host=SimpleNamespace(spec=spec))


def test_fields():
    assert downward(sandbox(), {"fieldRef": {"fieldPath": "metadata.labels['a']"}}) == 'x"y'
    assert downward(sandbox(), {"fieldRef": {"fieldPath": "metadata.labels['b']"}}) == ""
    assert downward(sandbox(), {"fieldRef": {"fieldPath": "metadata.labels"}}) == 'a="x\\"y"'
    assert downward(sandbox(), {"fieldRef": {"fieldPath": "status.podIP"}}) == "127.1.1.1"
    with pytest.raises(PodSpecError, match="status.phase"):
        downward(sandbox(), {"fieldRef": {"fieldPath": "status.phase"}})


@pytest.mark.parametrize(
    ("reference", "value"),
    [
        ({"resource": "limits.cpu"}, "2"),
        ({"resource": "limits.cpu", "divisor": "1m"}, "1500"),
        ({"resource": "limits.memory", "divisor": "1Mi"}, "1024"),
        ({"resource": "limits.nvidia.com/gpu"}, "2"),
        ({"resource": "requests.cpu"}, "0"),
    ],
)
def test_resource_fields(reference, value):
    assert downward(sandbox(), {"resourceFieldRef": reference}, "c") == value


def test_addresses_are_distinct_and_reused_last():
    one, other = ClusterNetwork(), ClusterNetwork()
    try:
        assert one.number != other.number
        first, second = one.part(0, 4), one.part(3, 4)
        assert first.allocate() != second.allocate()
        with pytest.raises(NoAddressError, match="at most 255"):
            one.part(0, 256)
    finally:
        one.close()
        other.close()
    few = PodAddresses(iter(["127.9.0"]))
    taken = [few.allocate() for _ in range(254)]
    assert len(set(taken)) == 254
    with pytest.raises(NoAddressError):
        few.allocate()
    few.release(taken[5])
    assert few.allocate() == taken[5]


def a_service(name: str, **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "n"}, "spec": {"selector": {"app": "a"}, **spec}}


def a_pod(ip: str | None, *, ready: bool = True, app: str = "a", deleting: bool = False, **spec: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": "p", "namespace": "n", "labels": {"app": app, "more": "x"}}
    if deleting:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    status = {"phase": "Running", "conditions": conditions, **({"podIP": ip} if ip else {})}
    return {"metadata": metadata, "spec": spec, "status": status}


@pytest.mark.parametrize(
    ("service", "pods", "found"),
    [
        (a_service("s"), [a_pod("1"), a_pod("2")], [("s", "1"), ("s", "2")]),
        (a_service("s"), [a_pod("1", hostname="h", subdomain="s")], [("s", "1"), ("h.s", "1")]),
        (a_service("s"), [a_pod("1", hostname="h", subdomain="other"), a_pod("2", app="b"), a_pod(None)], [("s", "1")]),
        (a_service("s"), [a_pod("1", ready=False), a_pod("2", deleting=True)], []),
        (a_service("s", publishNotReadyAddresses=True), [a_pod("1", ready=False)], [("s", "1")]),
        (a_service("s", selector=None), [a_pod("1")], []),
    ],
)
def test_names_and_their_addresses(service, pods, found):
    assert hosts_files.records([service], pods).get("n", []) == found


@pytest.mark.parametrize(("field", "text"), [("tailLines", "-3"), ("sinceSeconds", "x"), ("sinceTime", "yesterday")])
def test_bad_log_options_are_named(field, text):
    with pytest.raises(ValueError, match=field):
        LogOptions.parse({field: text})
