"""Who would have to end: the least that is enough, whatever objects lie around."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.api import labels
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cluster.pod_resources import Resources
from meshwright_operator.kube.pod_requests import PodRequest, read_pod_request
from meshwright_operator.scheduling.capacity_hint import capacity_hint, occupants
from meshwright_operator.scheduling.cluster_view import ClusterView
from tests.operator.builders import requested_by_node
from tests.operator.support import node

GPU = labels.GPU_RESOURCE


def pod(name: str, on: str, gpus: Any, job: str = "") -> PodRequest:
    container = {"resources": {"requests": {GPU: gpus}}}
    owner = {"kind": labels.KIND, "name": job, "uid": f"uid-{job}", "controller": True}
    found = read_pod_request(
        {
            "metadata": {"name": name, "namespace": "team", "ownerReferences": [owner] if job else None},
            "spec": {"nodeName": on, "containers": [container]},
            "status": {"phase": "Running"},
        },
        {},
    )
    assert found is not None
    return found


PODS = [
    pod("big-w0-0", "n0", "2", "big"),
    pod("big-w1-0", "n1", "2", "big"),
    pod("small-w0-0", "n2", "2", "small"),
    pod("notebook", "n3", "1"),
    pod("idle", "n3", "0"),
]
NODES = Inventory.from_objects([node(f"n{n}", "r0") for n in range(4)], []).holding(requested_by_node(PODS, GPU)[0])


def seen(pods: list[PodRequest]) -> ClusterView:
    view = ClusterView()
    view.apply({one.name: one for one in pods})
    return view


def whole(freed: Mapping[str, Resources]) -> int:
    """Nodes with both GPUs free once these amounts are."""
    nodes = NODES.nodes.values()
    return sum(1 for found in nodes if (found.free + freed.get(found.name, Resources())).gpus >= 2)


def test_holders_are_jobs_and_pods_the_largest_first_without_the_one_who_asks() -> None:
    view = seen(PODS)
    assert [(h.name, h.gpus) for h in occupants(view, GPU, "")] == [
        ("job team/big", 4), ("job team/small", 2), ("pod team/notebook", 1),
    ]  # fmt: skip
    assert [h.name for h in occupants(view, GPU, "uid-big")] == ["job team/small", "pod team/notebook"]


def test_what_somebody_holds_is_free_when_he_is_gone() -> None:
    assert whole({}) == 0
    assert whole(occupants(seen(PODS), GPU, "")[0].requested) == 2


def test_the_least_that_is_enough_is_named() -> None:
    found = occupants(seen(PODS), GPU, "")
    assert capacity_hint(found, lambda i: whole(i) >= 1) == "Fits when pod team/notebook (1 GPU) ends"
    assert capacity_hint(found, lambda i: whole(i) >= 2) == "Fits when job team/big (4 GPUs) ends"
    assert capacity_hint(found, lambda i: whole(i) >= 3) == (
        "Fits when job team/big (4 GPUs) and job team/small (2 GPUs) end"
    )
    assert capacity_hint(found, lambda i: whole(i) >= 5) == ""


def test_malformed_pods_hold_nothing() -> None:
    nothing: list[Any] = [{}, {"metadata": None}, {"metadata": {"name": "x"}, "spec": 7}, {"spec": {"nodeName": "n0"}}]
    assert [read_pod_request(obj, {}) for obj in nothing] == [None] * len(nothing)
    broken = [pod("odd", "n0", "many"), pod("none", "n0", None), replace(pod("null", "n0", "1"), request_json="null")]
    view = seen([*broken, *PODS])
    assert occupants(view, GPU, "") == occupants(seen(PODS), GPU, "")
    assert view.use_of(GPU).by_node == requested_by_node(PODS, GPU)[0]
    assert [text.split()[1] for text in view.use_of(GPU).malformed.values()] == ["odd", "none", "null"]
