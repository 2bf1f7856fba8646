"""The pure parts of controllers and node agent: ownership, eviction, quantities, time, paths, texts, status."""

import datetime
from pathlib import Path

import pytest

from meshwright.local import clock
from meshwright.local.controllers.eviction import NOT_READY, UNREACHABLE, seconds_to_stay
from meshwright.local.controllers.ownership import Graph, Node, OwnerState, Verdict, judge
from meshwright.local.nodeagent.addresses import ClusterNetwork, NoAddressError, PodAddresses
from meshwright.local.nodeagent.environment import expand
from meshwright.local.nodeagent.fields import FieldError, PodPlace, field, resource_field
from meshwright.local.nodeagent.paths import PathMap
from meshwright.local.nodeagent.state import ContainerState, PodState, Terminated, phase, status
from meshwright.local.quantities import thousandths, whole
from meshwright.local.resources import CONFIG_MAPS

SOLID, LEAVING, GONE = OwnerState.SOLID, OwnerState.LEAVING, OwnerState.GONE


def thing(uid, *owners, finalizers=(), deleting=False):
    references = [{"uid": owner, "blockOwnerDeletion": True} for owner in owners]
    metadata = {
        "name": uid,
        "namespace": "n",
        "uid": uid,
        "ownerReferences": references,
        "finalizers": list(finalizers),
    }
    if deleting:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return Node.of(CONFIG_MAPS, {"metadata": metadata})


@pytest.mark.parametrize(
    ("node", "states", "owns", "verdict"),
    [
        (thing("x"), {}, False, Verdict()),
        (thing("x", "a"), {"a": SOLID}, False, Verdict()),
        (thing("x", "a"), {"a": GONE}, False, Verdict(delete="Background")),
        (thing("x", "a"), {"a": LEAVING}, False, Verdict(delete="Background")),
        (thing("x", "a"), {"a": LEAVING}, True, Verdict(delete="Foreground")),
        (thing("x", "a", "b"), {"a": GONE, "b": SOLID}, False, Verdict(drop_owners=frozenset({"a"}))),
        (thing("x", "a", "b"), {"a": GONE, "b": GONE}, False, Verdict(delete="Background")),
        (thing("x", "a", finalizers=["orphan"]), {"a": GONE}, False, Verdict(delete="Orphan")),
        (thing("x", "a", finalizers=["foregroundDeletion"]), {"a": GONE}, True, Verdict(delete="Foreground")),
        (thing("x", "a", deleting=True), {"a": GONE}, False, Verdict()),
    ],
)
def test_garbage_verdicts(node, states, owns, verdict):
    assert judge(node, states, owns) == verdict


def test_the_graph_follows_changes_of_owners():
    graph = Graph()
    for node in (thing("a"), thing("b"), thing("x", "a")):
        graph.put(node)
    assert [node.uid for node in graph.dependents("a")] == ["x"]
    graph.put(thing("x", "b"))
    assert graph.dependents("a") == []
    assert [node.uid for node in graph.blockers("b")] == ["x"]
    graph.remove("x")
    assert graph.blockers("b") == []


def taint(key, effect="NoExecute"):
    return {"key": key, "effect": effect}


def tolerate(key, seconds=None):
    return {"key": key, "operator": "Exists", **({} if seconds is None else {"tolerationSeconds": seconds})}


@pytest.mark.parametrize(
    ("taints", "tolerations", "stay"),
    [
        ([], [], None),
        ([taint("x", "NoSchedule")], [], None),
        ([taint("x")], [], 0),
        ([taint("x")], [tolerate("x")], None),
        ([taint("x")], [tolerate("x", 7)], 7),
        ([taint("x")], [tolerate("x"), tolerate("x", 7)], 7),
        ([taint("x"), taint("y")], [tolerate("x", 7)], 0),
        ([taint(UNREACHABLE)], [], 30),
        ([taint(NOT_READY)], [tolerate(NOT_READY, 300)], 300),
        ([taint(UNREACHABLE)], [tolerate(UNREACHABLE)], None),
    ],
)
def test_seconds_to_stay(taints, tolerations, stay):
    assert seconds_to_stay(taints, tolerations, 30) == stay


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1000),
        ("250m", 250),
        ("1.5", 1500),
        ("1Ki", 1024000),
        ("1e3", 1000000),
        ("1k", 1000000),
        ("1n", 1),
        ("0", 0),
    ],
)
def test_quantities(text, value):
    assert thousandths(text) == value


def test_whole_quantities_round_up():
    assert whole("100m") == 1
    assert whole("1.5Gi") == 3 * 2**29


@pytest.mark.parametrize("text", ["", "x", "1x", "1 Gi", "--1", "1e", None])
def test_no_quantities(text):
    with pytest.raises(ValueError, match="is not a quantity"):
        thousandths(text)


@pytest.mark.parametrize(
    ("text", "microsecond"),
    [("2026-01-02T03:04:05Z", 0), ("2026-01-02T03:04:05.123456789Z", 123456), ("2026-01-02T03:04:05.5+00:00", 500000)],
)
def test_times(text, microsecond):
    expected = datetime.datetime(2026, 1, 2, 3, 4, 5, microsecond, datetime.UTC)
    assert clock.parse(text) == expected


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
        ("a /data/x", "a /data/x"),
        ("http://h/data/x", "http://h/data/x"),
        ("", ""),
    ],
)
def test_paths(value, real):
    paths = PathMap({"/data": Path("/real/d"), "/data/deep/": Path("/real/deep")})
    assert paths.text(value) == real


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
PLACE = PodPlace("node", "127.1.1.1", "127.0.0.1", {"cpu": "64", "nvidia.com/gpu": "2"})


def test_fields():
    assert field(POD, "metadata.labels['a']", PLACE) == 'x"y'
    assert field(POD, "metadata.labels['b']", PLACE) == ""
    assert field(POD, "metadata.labels", PLACE) == 'a="x\\"y"'
    assert field(POD, "status.podIP", PLACE) == "127.1.1.1"
    with pytest.raises(FieldError, match="status.phase"):
        field(POD, "status.phase", PLACE)


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
    assert resource_field(POD, reference, "c", PLACE) == value


def test_addresses_are_distinct_and_reused_last():
    one, other = ClusterNetwork(), ClusterNetwork()
    try:
        assert one.number != other.number
        first, second = one.part(0, 4), one.part(3, 4)
        assert first.take() != second.take()
        with pytest.raises(NoAddressError, match="at most 255"):
            one.part(0, 256)
    finally:
        one.close()
        other.close()
    few = PodAddresses(iter(["127.9.0"]))
    taken = [few.take() for _ in range(254)]
    assert len(set(taken)) == 254
    with pytest.raises(NoAddressError):
        few.take()
    few.give_back(taken[5])
    assert few.take() == taken[5]


def pod_state(*containers, **more):
    return PodState("127.1.1.1", "127.0.0.1", "t", [], list(containers), **more)


def container(code=None, *, running=False, ready=False):
    ended = None if code is None else Terminated(code, "", "s", "f")
    return ContainerState("c", "i", "id", running_since="s" if running else None, terminated=ended, ready=ready)


@pytest.mark.parametrize(
    ("state", "result"),
    [
        (pod_state(container()), "Pending"),
        (pod_state(container(running=True)), "Running"),
        (pod_state(container(0), container(running=True)), "Running"),
        (pod_state(container(0), container(0), over=True), "Succeeded"),
        (pod_state(container(0), container(2), over=True), "Failed"),
        (pod_state(container(), over=True), "Failed"),
        (pod_state(container(0), over=True, reason="DeadlineExceeded"), "Failed"),
    ],
)
def test_phases(state, result):
    assert phase(state) == result


def test_readiness_gates_hold_ready_back():
    state = pod_state(container(running=True, ready=True))

    def ready(others):
        conditions = status(state, ["example.com/gate"], others)["conditions"]
        return {item["type"]: item["status"] for item in conditions}["Ready"]

    assert ready([]) == "False"
    assert ready([{"type": "example.com/gate", "status": "True"}]) == "True"
