"""The pure parts of controllers: ownership, eviction, quantities, time."""

import datetime

import pytest

from meshwright_local.controllers.node_lifecycle import NOT_READY, UNREACHABLE, seconds_to_stay
from meshwright_local.controllers.owner_graph import DependentDecision, Graph, Node, OwnerState, decide_dependent
from meshwright_local.kube import timestamps
from meshwright_local.kube.quantities import integer_value, milli_value
from meshwright_local.kube.resources import CONFIG_MAPS

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
        (thing("x"), {}, False, DependentDecision()),
        (thing("x", "a"), {"a": SOLID}, False, DependentDecision()),
        (thing("x", "a"), {"a": GONE}, False, DependentDecision(delete="Background")),
        (thing("x", "a"), {"a": LEAVING}, False, DependentDecision(delete="Background")),
        (thing("x", "a"), {"a": LEAVING}, True, DependentDecision(delete="Foreground")),
        (thing("x", "a", "b"), {"a": GONE, "b": SOLID}, False, DependentDecision(drop_owners=frozenset({"a"}))),
        (thing("x", "a", "b"), {"a": GONE, "b": GONE}, False, DependentDecision(delete="Background")),
        (thing("x", "a", finalizers=["orphan"]), {"a": GONE}, False, DependentDecision(delete="Orphan")),
        (thing("x", "a", finalizers=["foregroundDeletion"]), {"a": GONE}, True, DependentDecision(delete="Foreground")),
        (thing("x", "a", deleting=True), {"a": GONE}, False, DependentDecision()),
    ],
)
def test_garbage_verdicts(node, states, owns, verdict):
    assert decide_dependent(node, states, owns) == verdict


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
    assert milli_value(text) == value


def test_integer_quantities_round_up():
    assert integer_value("100m") == 1
    assert integer_value("1.5Gi") == 3 * 2**29


@pytest.mark.parametrize("text", ["", "x", "1x", "1 Gi", "--1", "1e", None])
def test_no_quantities(text):
    with pytest.raises(ValueError, match="is not a quantity"):
        milli_value(text)


@pytest.mark.parametrize(
    ("text", "microsecond"),
    [("2026-01-02T03:04:05Z", 0), ("2026-01-02T03:04:05.123456789Z", 123456), ("2026-01-02T03:04:05.5+00:00", 500000)],
)
def test_times(text, microsecond):
    expected = datetime.datetime(2026, 1, 2, 3, 4, 5, microsecond, datetime.UTC)
    assert timestamps.parse(text) == expected
