"""Inventory: what counts, what is left out and why, and that nothing malformed takes others down."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.api.labels import LABEL_JOB_UID
from meshwright.api.workers import Toleration
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cluster.quantities import parse_quantity
from meshwright.planner.cost.accelerators import gpu_memory_bytes
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.placement import place
from meshwright.planner.topology import DEFAULT_LEVELS
from tests.planner.builders import GPU, inventory, node, plan_of, pod

TAINT = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", Fraction(8)),
        (8, Fraction(8)),
        ("500m", Fraction(1, 2)),
        ("1.5Gi", Fraction(3 * 2**29)),
        ("1e3", Fraction(1000)),
        ("2E", Fraction(2 * 10**18)),
        ("100n", Fraction(1, 10**7)),
        (".5", Fraction(1, 2)),
        ("-1", Fraction(-1)),
    ],
)
def test_quantities_are_exact(text: object, value: Fraction) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize("bad", ["", "x", "1 Gi", "1gi", None, 1.5, True, "1e9999999", "9" * 100, []])
def test_what_is_no_quantity_is_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="not a Kubernetes quantity"):
        parse_quantity(bad)


def test_free_is_allocatable_minus_what_pods_hold() -> None:
    pods = (
        pod("running", gpus=2, on="n0"),
        pod("gated", gpus=1, pinned="n0", phase="Pending"),
        pod("ended", gpus=4, on="n0", phase="Succeeded"),
        pod("failed", gpus=4, on="n0", phase="Failed"),
        pod("anywhere", gpus=4, phase="Pending"),
        pod("elsewhere", gpus=3, on="n1"),
    )
    found = inventory(node("n0"), node("n1"), pods=pods)
    assert (found.nodes["n0"].free.gpus, found.nodes["n1"].free.gpus) == (5, 5)
    assert found.nodes["n0"].free.pods == 108


@pytest.mark.parametrize(
    "spec",
    [
        {"nodeSelector": {"kubernetes.io/hostname": "host-of-n0"}},
        {
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [
                            {
                                "matchExpressions": [
                                    {"key": "kubernetes.io/hostname", "operator": "In", "values": ["host-of-n0"]}
                                ]
                            }
                        ]
                    }
                }
            }
        },
    ],
)
def test_a_pod_pinned_by_host_name_counts_on_the_node_of_that_name(spec: dict[str, Any]) -> None:
    host = node("n0", labels={"kubernetes.io/hostname": "host-of-n0"})
    assert inventory(host, pods=(pod("p", gpus=3, **spec),)).nodes["n0"].free.gpus == 5


def test_a_pod_with_a_choice_of_nodes_counts_nowhere() -> None:
    either = pod("p", gpus=3, pinned="n0")
    terms = either["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    terms["nodeSelectorTerms"][0]["matchFields"][0]["values"].append("n1")
    found = inventory(node("n0"), node("n1"), pods=(either,))
    assert [n.free.gpus for n in found.usable] == [8, 8]


def test_the_jobs_own_pods_are_not_counted_when_asked() -> None:
    own = pod("own", gpus=4, on="n0")
    own["metadata"]["labels"] = {LABEL_JOB_UID: "u1"}
    assert inventory(node("n0"), pods=(own,), without_job="u1").nodes["n0"].free.gpus == 8
    assert inventory(node("n0"), pods=(own,), without_job="u2").nodes["n0"].free.gpus == 4


def container(resources: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": "c", "resources": resources, **more}


@pytest.mark.parametrize(
    ("spec", "gpus", "cpu"),
    [
        ({"containers": [container({"requests": {"cpu": "1"}}), container({"limits": {GPU: 2, "cpu": "2"}})]}, 2, 3000),
        (
            {
                "containers": [container({"requests": {"cpu": "1"}})],
                "initContainers": [container({"requests": {"cpu": "5"}})],
            },
            0,
            5000,
        ),
        (
            {
                "containers": [container({"requests": {"cpu": "1"}})],
                "initContainers": [container({"requests": {"cpu": "1500m", GPU: 1}}, restartPolicy="Always")],
                "overhead": {"cpu": "250m"},
            },
            1,
            2750,
        ),
        (
            {
                "containers": [container({"requests": {"cpu": "1"}})],
                "initContainers": [
                    container({"requests": {"cpu": "3"}}),
                    container({"requests": {"cpu": "500m"}}, restartPolicy="Always"),
                    container({"requests": {"cpu": "2750m"}}),
                ],
            },
            0,
            3250,
        ),
        ({"containers": [container({})], "resources": {"requests": {"cpu": "7"}}}, 0, 7000),
        (
            {"containers": [container({})], "resources": {"requests": {"cpu": "7"}}, "overhead": {"cpu": "250m"}},
            0,
            7250,
        ),
    ],
)
def test_a_pods_request_is_what_the_scheduler_reserves(spec: dict[str, Any], gpus: int, cpu: int) -> None:
    found = inventory(node("n0"), pods=({"metadata": {"name": "p"}, "spec": {**spec, "nodeName": "n0"}},))
    free = found.nodes["n0"].free
    assert (8 - free.gpus, 64_000 - free.cpu_milli) == (gpus, cpu)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (node("n", unschedulable=True), "cordoned"),
        (node("n", gpus=0), "no nvidia.com/gpu"),
        (node("n", taints=[TAINT]), "taint gpu is not tolerated"),
        (node("n", labels={"nvidia.com/gpu.product": "A100-SXM4-40GB-MIG-1g.5gb"}), "slices"),
        (node("n", labels={"nvidia.com/gpu.product": "NVIDIA-A10-SHARED"}), "slices"),
        (node("n", labels={"nvidia.com/gpu.replicas": "4"}), "shared by 4 pods"),
        ({**node("n"), "status": {**node("n")["status"], "conditions": []}}, "not ready"),
        (
            {**node("n"), "status": {**node("n")["status"], "conditions": [{"type": "Ready", "status": "Unknown"}]}},
            "not ready",
        ),
        (node("n", labels={"team": "b"}), "label team is b, not a"),
        (node("n", labels={"teams": "a"}), "no label team, but teams"),
        (node("n"), "no label team"),
    ],
)
def test_a_node_that_cannot_take_workers_is_known_with_the_reason(bad: dict[str, Any], reason: str) -> None:
    selector = {"team": "a"} if "team" in reason else {}
    found = inventory(bad, node_selector=selector)
    assert found.usable == []
    assert reason in found.nodes["n"].unusable


def test_a_wrong_gpu_resource_is_named_with_the_nearest_that_nodes_have() -> None:
    found = Inventory.from_objects([node("n")], [], gpu_resource="nvidia.com/gpus")
    assert found.unusable == {}, "nodes without GPUs are usually not worth a word"
    assert found.excluded == {"n": "no nvidia.com/gpus, but nvidia.com/gpu"}
    other = Inventory.from_objects([node("n"), node("cpu", gpus=0)], [])
    assert other.excluded == {}


@pytest.mark.parametrize(
    ("toleration", "taint", "usable"),
    [
        (Toleration(operator="Exists"), TAINT, True),
        (Toleration(key="gpu", operator="Exists"), TAINT, True),
        (Toleration(key="gpu", value="yes"), TAINT, True),
        (Toleration(key="gpu", value="no"), TAINT, False),
        (Toleration(key="gpu", value="yes", effect="NoExecute"), TAINT, False),
        (Toleration(key="other", operator="Exists"), TAINT, False),
        (Toleration(key="other"), {**TAINT, "effect": "PreferNoSchedule"}, True),
    ],
)
def test_taints_and_tolerations_meet_as_in_the_scheduler(
    toleration: Toleration, taint: dict[str, str], usable: bool
) -> None:
    found = inventory(node("n", taints=[taint]), tolerations=[toleration])
    assert bool(found.usable) is usable


@pytest.mark.parametrize(
    ("labels", "domain", "rack"),
    [
        ({}, "host/n", "domain/host/n"),
        ({"nvidia.com/gpu.clique": "u.1", "fabric.topograph.run/tier-0": "leaf7"}, "u.1", "leaf7"),
        ({"accelerator.topograph.run/domain": "nvl3"}, "nvl3", "domain/nvl3"),
        ({"network.topology.nvidia.com/accelerator": "a", "network.topology.nvidia.com/block": "b"}, "a", "b"),
        (
            {"topology.k8s.aws/network-node-layer-1": "spine", "topology.k8s.aws/network-node-layer-3": "leaf"},
            "host/n",
            "leaf",
        ),
        (
            {"cloud.google.com/gce-topology-block": "blk", "cloud.google.com/gce-topology-subblock": "sub"},
            "host/n",
            "sub",
        ),
        (
            {"nvidia.com/gpu.clique": "unknown", "network.topology.nvidia.com/leaf": "Unknown"},
            "host/n",
            "domain/host/n",
        ),
        ({"nvidia.com/gpu.clique": "", "network.topology.nvidia.com/accelerator": "x"}, "x", "domain/x"),
    ],
)
def test_fabric_labels_of_every_generation(labels: dict[str, str], domain: str, rack: str) -> None:
    place = inventory(node("n", rack=None, labels=labels)).nodes["n"].place
    assert (place.domain, place.rack) == (domain, rack)


def test_unlabeled_nodes_share_nothing_and_are_warned_of() -> None:
    found = inventory(*(node(f"n{i}", rack=None) for i in range(3)), node("n3"))
    assert len({n.place.rack for n in found.usable}) == 4
    assert found.warnings == ("3 of 4 GPU nodes have no rack label: each of their NVLink domains counts as a rack",)


def test_a_host_named_like_a_domain_label_is_not_in_that_domain() -> None:
    found = inventory(node("x"), node("y", domain="x"))
    assert len({n.place.domain for n in found.usable}) == 2


def test_a_domain_with_two_racks_gets_the_commonest_and_a_warning() -> None:
    found = inventory(*(node(f"n{i}", rack=rack, domain="d") for i, rack in enumerate(["a", "b", "b"])))
    assert {n.place.rack for n in found.usable} == {"b"}
    assert found.warnings == ("NVLink domain d is labelled with several racks; b is taken",)


def test_zones_count_only_where_someone_names_them() -> None:
    none = inventory(*(node(f"n{i}", zone=None, rack=f"r{i}") for i in range(2)))
    assert {n.place.zone for n in none.usable} == {""}
    assert none.warnings == ()
    some = inventory(node("n0", rack="a"), node("n1", rack="a", zone=None), node("n2", rack="b", zone=None))
    assert [n.place.zone for n in some.usable] == ["zone0", "zone0", "rack/b"]
    assert "1 of 3 GPU nodes has no zone label" in some.warnings[0]


@pytest.mark.parametrize(
    ("product", "gib"),
    [
        ("NVIDIA-A100-SXM4-40GB", 39.5),
        ("NVIDIA-A100-PCIE-40GB", 39.5),
        ("NVIDIA-A100-SXM4-80GB", 79.2),
        ("NVIDIA-A100-80GB-PCIe", 79.2),
        ("NVIDIA-H100-80GB-HBM3", 79.6),
        ("NVIDIA-H200", 140.4),
        ("NVIDIA-B200", 179),
        ("NVIDIA-GB200", 185),
        ("Tesla-T4", 15),
        ("NVIDIA-T400-4GB", None),
        ("Simulated-GPU", None),
        ("", None),
    ],
)
def test_the_catalog_knows_memory_by_whole_words(product: str, gib: float | None) -> None:
    assert gpu_memory_bytes(product) == (None if gib is None else int(gib * 2**30))


def test_the_memory_label_wins_over_the_catalog() -> None:
    labels = {"nvidia.com/gpu.product": "NVIDIA-H200"}
    assert inventory(node("n", memory_mib=1024, labels=labels)).nodes["n"].gpu_memory_bytes == 1 << 30
    assert inventory(node("n", memory_mib=None, labels=labels)).nodes["n"].gpu_memory_bytes == int(140.4 * 2**30)
    assert inventory(node("n", memory_mib=None)).nodes["n"].gpu_memory_bytes is None


def test_a_malformed_node_takes_only_itself_out() -> None:
    bad = [
        {},
        {"metadata": None},
        {"metadata": {"name": ""}},
        node("taints", taints=5),
        {**node("quantity"), "status": {"allocatable": {GPU: "many"}, "conditions": []}},
        {**node("negative"), "status": {"allocatable": {GPU: "-1"}, "conditions": []}},
    ]
    found = inventory(*bad, node("good"))
    assert [n.name for n in found.usable] == ["good"]
    assert len(found.warnings) == len(bad)
    assert any("quantity" in warning for warning in found.warnings)


def test_a_malformed_pod_takes_only_itself_out() -> None:
    bad = pod("bad", on="n0")
    bad["spec"]["containers"][0]["resources"] = {"requests": {GPU: "lots"}}
    found = inventory(node("n0"), pods=(bad, pod("good", gpus=1, on="n0")))
    assert found.nodes["n0"].free.gpus == 7
    assert "pod bad was not counted" in found.warnings[0]


PARTS = st.sampled_from(
    [
        "name",
        "labels",
        "allocatable",
        "conditions",
        "taints",
        "containers",
        "resources",
        "nodeName",
        "affinity",
        "phase",
    ]
)
odd = st.sampled_from([None, 5, True, "text", [], [5], {}, {"a": 5}, {"name": ["x"]}])
objects = st.lists(
    st.fixed_dictionaries(
        {}, optional={part: odd | st.dictionaries(PARTS, odd, max_size=4) for part in ("metadata", "spec", "status")}
    ),
    max_size=4,
)


@given(objects)
def test_no_object_of_any_shape_raises(found_objects: list[Any]) -> None:
    found = Inventory.from_objects([*found_objects, node("good")], found_objects)
    assert "good" in [n.name for n in found.usable]


def test_only_nodes_with_gpus_are_listed_as_unusable() -> None:
    found = inventory(node("cpu", gpus=0), node("gpu", unschedulable=True))
    assert found.unusable == {"gpu": "cordoned"}


@pytest.mark.parametrize("stated", ["0", "-5", "many", "", "9" * 40, "²"])
def test_a_memory_label_that_is_no_memory_is_ignored_and_named(stated: str) -> None:
    found = inventory(node("n0", memory_mib=None, labels={"nvidia.com/gpu.memory": stated}))
    assert found.nodes["n0"].gpu_memory_bytes is None
    assert "node n0: label nvidia.com/gpu.memory is" in found.warnings[0]


def test_nodes_on_which_pods_hold_more_than_there_is_are_named() -> None:
    found = inventory(node("n0", gpus=4), node("n1"), pods=(pod("p", gpus=6, on="n0"),))
    assert found.warnings == ("pods use more GPUs than these nodes have: n0; nothing is placed there",)
    assert place(plan_of(4, 1, 2, 4), found).nodes == {0: "n1", 1: "n1"}


def test_no_node_at_all_is_no_room_and_no_crash() -> None:
    with pytest.raises(
        DoesNotFitError,
        match="^0 of .*without any other pod, no worker fits on the usable nodes. Add nodes on which one fits$",
    ):
        place(plan_of(2, 2, 2, 2), inventory())


LABELS = st.dictionaries(
    st.sampled_from([key for level in DEFAULT_LEVELS for key in level.keys] + ["nvidia.com/gpu.product"]),
    st.sampled_from(["a", "b", "unknown", "", None, 5, "NVIDIA-H100-80GB-HBM3", ["x"]]),
    max_size=4,
)


@given(st.lists(st.tuples(LABELS, st.integers(-1, 9), st.booleans()), max_size=8), st.integers(0, 12))
@settings(max_examples=80, deadline=None)
def test_fuzzed_clusters_are_placed_on_or_refused_with_a_reason(
    shapes: list[tuple[dict[str, Any], int, bool]], held: int
) -> None:
    nodes = []
    for index, (labels, gpus, cordoned) in enumerate(shapes):
        nodes.append(node(f"n{index}", gpus=gpus, rack=None, zone=None, unschedulable=cordoned))
        nodes[-1]["metadata"]["labels"] |= labels
    found = inventory(*nodes, pods=(pod("p", gpus=held, on="n0"),))
    try:
        placement = place(plan_of(2, 2, 2, 2), found)
    except DoesNotFitError as error:
        reason = str(error)
        if " missing" not in reason:
            raise
        return
    for name, count in Counter(placement.nodes.values()).items():
        assert 2 * count <= found.nodes[name].free.gpus
        assert not found.nodes[name].unusable
