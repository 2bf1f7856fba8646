"""Topology: every known generation of labels, trees out of contradictions, and what links cost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.placement import place
from meshwright.planner.topology import DEFAULT_LEVELS, Level, as_tree, locate
from meshwright.planner.topology.levels import LABEL_SETS, LabelSet, levels_of
from meshwright.planner.topology.links import Links
from meshwright.planner.topology.location import unknown_location
from tests.planner.builders import inventory, node, plan_of

TOPOGRAPH = [
    (
        "network.topology.nvidia.com/accelerator",
        "network.topology.nvidia.com/block",
        "network.topology.nvidia.com/spine",
    ),
    (
        "network.topology.nvidia.com/accelerator",
        "network.topology.nvidia.com/leaf",
        "network.topology.nvidia.com/spine",
    ),
    ("xclr.topology.nvidia.com/domain", "network.topology.nvidia.com/tier-0", "network.topology.nvidia.com/tier-1"),
    ("accelerator.topograph.run/domain", "fabric.topograph.run/tier-0", "fabric.topograph.run/tier-1"),
]


@pytest.mark.parametrize(("domain", "rack", "spine"), TOPOGRAPH)
def test_all_four_generations_of_topograph_give_the_same_tree(domain: str, rack: str, spine: str) -> None:
    place = locate("n", {domain: "d", rack: "r", spine: "s"}, DEFAULT_LEVELS)
    assert (place.domain, place.rack, place.at("spine")) == ("d", "r", "s")


@pytest.mark.parametrize(
    ("labels", "rack", "spine", "core"),
    [
        ({f"topology.k8s.aws/network-node-layer-{i}": f"l{i}" for i in (1, 2, 3)}, "l3", "l2", "l1"),
        (
            {
                "oci.oraclecloud.com/rdma.local_block_id": "a",
                "oci.oraclecloud.com/rdma.network_block_id": "b",
                "oci.oraclecloud.com/rdma.hpc_island_id": "c",
            },
            "a",
            "b",
            "c",
        ),
        ({"ib.coreweave.cloud/leafgroup": "1", "ib.coreweave.cloud/superpod": "2"}, "1", "2", "spine/2"),
        ({"alibabacloud.com/asw-id": "x", "alibabacloud.com/point-of-delivery": "y"}, "x", "y", "spine/y"),
        (
            {"oci.oraclecloud.com/rdma.local_block_id": "no-imds-data"},
            "domain/host/n",
            "domain/host/n",
            "domain/host/n",
        ),
    ],
)
def test_clouds_count_their_layers_in_their_own_direction(
    labels: dict[str, str], rack: str, spine: str, core: str
) -> None:
    place = locate("n", labels, DEFAULT_LEVELS)
    assert (place.rack, place.at("spine"), place.at("core")) == (rack, spine, core)


TOY = LabelSet("a toy cloud", {"rack": ("example.com/aisle",), "spine": ("example.com/hall",)})


def test_one_declaration_of_a_label_set_places_a_job_by_it() -> None:
    aisles = {"a": ("x", "y"), "b": ("y", "z"), "c": ("x", "z")}
    nodes = [
        node(f"{row}{hall}", rack=None, labels={"example.com/aisle": f"{row}{hall}", "example.com/hall": hall})
        for row, halls in aisles.items()
        for hall in halls
    ]
    nodes += [node("y-too", rack=None, labels={"example.com/aisle": "by", "example.com/hall": "y"})]
    found = inventory(*nodes, levels=levels_of((*LABEL_SETS, TOY)))
    assert found.levels == ("domain", "rack", "spine", "zone")
    placement = place(plan_of(8, 1, 3, 8), found)
    assert {at.at("spine") for at in placement.places.values()} == {"y"}
    pair = place(plan_of(8, 1, 2, 8), found)
    assert set(pair.nodes.values()) == {"by", "y-too"}
    unlabeled = inventory(*nodes)
    assert len({at.rack for at in place(plan_of(8, 1, 2, 8), unlabeled).places.values()}) == 2


def test_an_earlier_label_set_counts_first() -> None:
    labels = {"example.com/aisle": "7", "network.topology.nvidia.com/leaf": "other"}
    assert locate("n", labels, levels_of((TOY, *LABEL_SETS))).rack == "7"
    assert locate("n", labels, levels_of((*LABEL_SETS, TOY))).rack == "other"


def test_a_label_set_names_only_levels_that_exist() -> None:
    with pytest.raises(ValueError, match="a toy cloud: unknown fabric level 'row': use one of domain, rack, spine"):
        LabelSet("a toy cloud", {"row": ("example.com/row",)})


def test_any_level_can_be_added() -> None:
    levels = (*DEFAULT_LEVELS[:2], Level("row", ("example.com/row",)), *DEFAULT_LEVELS[2:])
    nodes = [node(f"n{i}", rack=f"r{i}", labels={"example.com/row": f"{i // 2}"}) for i in range(4)]
    found = inventory(*nodes, levels=levels)
    assert found.levels == ("domain", "rack", "row", "zone")
    assert [found.nodes[f"n{i}"].place.at("row") for i in range(4)] == ["0", "0", "1", "1"]


def test_levels_that_no_node_names_are_left_out() -> None:
    assert inventory(node("n", zone=None)).levels == ("domain", "rack")
    assert inventory(node("n")).levels == ("domain", "rack", "zone")


def test_a_label_that_fits_no_tree_gives_way_and_is_named() -> None:
    spine = "network.topology.nvidia.com/spine"
    nodes = [node(f"n{i}", rack="leaf0", labels={spine: "a" if i else "b"}) for i in range(3)]
    found = inventory(*nodes)
    assert {n.place.at("spine") for n in found.usable} == {"a"}
    assert found.warnings == ("rack leaf0 is labelled with several spines; a is taken",)


def test_many_contradictions_are_counted_rather_than_listed() -> None:
    nodes = [node(f"n{i}", rack=f"r{i // 2}", zone=f"z{i % 2}") for i in range(40)]
    found = inventory(*nodes)
    assert len(found.warnings) == 9
    assert found.warnings[-1] == "12 more places are labelled with several places above them"


labels = st.dictionaries(
    st.sampled_from([key for level in DEFAULT_LEVELS for key in level.keys]),
    st.sampled_from(["a", "b", "c", "unknown", ""]),
    max_size=5,
)


@given(st.dictionaries(st.sampled_from([f"n{i}" for i in range(8)]), labels, max_size=8))
@settings(max_examples=80, deadline=None)
def test_any_labels_become_a_tree(found: dict[str, dict[str, str]]) -> None:
    places, _ = as_tree({name: locate(name, given, DEFAULT_LEVELS) for name, given in found.items()}, DEFAULT_LEVELS)
    assert set(places) == set(found)
    for one in places.values():
        for other in places.values():
            same = [a == b for a, b in zip(one.names, other.names, strict=True)]
            assert same == sorted(same), "who shares a place shares all places above it"


def test_a_node_nobody_knows_is_alone_at_every_level() -> None:
    one, other = unknown_location("x", ("domain", "rack", "zone")), unknown_location("y", ("domain", "rack", "zone"))
    assert not set(one.names) & set(other.names)


def test_links_get_narrower_the_wider_they_reach() -> None:
    links = Links(("domain", "rack", "spine", "core"), inside=450e9, nic=50e9, measured={"spine": 10e9})
    found = [links.between(level) for level in links.levels]
    assert found == [50e9, 40e9, 10e9, 50e9 / 7]
    assert links.extra_seconds_per_byte("rack") == pytest.approx(1 / 40e9 - 1 / 50e9)
    total = sum(links.extra_seconds_per_byte(level) for level in links.levels)
    assert total == pytest.approx(7 / 50e9 - 1 / 450e9)


@pytest.mark.parametrize(("inside", "nic", "measured"), [(0, 1, {}), (1, -1, {}), (1, 1, {"rack": 0})])
def test_a_bandwidth_must_be_above_zero(inside: float, nic: float, measured: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        Links(("domain", "rack"), inside, nic, measured)
