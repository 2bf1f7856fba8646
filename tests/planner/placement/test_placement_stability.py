"""What must not move: workers that lost nothing, replicas across a resize, and a placement that was good already."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.placement import (
    Placement,
    PlacingOptions,
    keep_on_resize,
    place,
    remap_ranks,
    spare_nodes,
    with_spares,
)
from meshwright.planner.placement.fragmentation import cost_of_fragmentation, nodes_to_free
from meshwright.planner.placement.objective import crossings
from meshwright.planner.placement.rank_blocks import Dimension
from meshwright.planner.plan import Plan
from tests.planner.builders import inventory, node, plan_of, pod, racks
from tests.planner.placement.test_placement import check, clusters, plans, tried

QUICK = PlacingOptions(effort=20_000)


def quick(plan: Plan, found: Inventory, **how: Any) -> Placement | None:
    try:
        return place(plan, found, options=QUICK, **how)
    except DoesNotFitError:
        return None


@given(clusters(), plans, st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(1, 8)), max_size=3))
@settings(max_examples=50, deadline=None)
def test_more_nodes_never_cost_more_when_the_old_placement_is_a_candidate(
    nodes: list[Any], plan: Plan, added: list[tuple[int, int, int]]
) -> None:
    before = quick(plan, inventory(*nodes))
    assume(before is not None)
    assert before is not None
    more = [
        node(f"new{i}", gpus=gpus, rack=f"z{zone}r{rack}", zone=f"z{zone}")
        for i, (zone, rack, gpus) in enumerate(added)
    ]
    after = quick(plan, inventory(*nodes, *more), previous=before.nodes)
    assert after is not None
    assert after.cost <= before.cost


@given(clusters(), plans, st.data())
@settings(max_examples=50, deadline=None)
def test_workers_that_lost_nothing_never_move(nodes: list[Any], plan: Plan, data: st.DataObject) -> None:
    before = quick(plan, inventory(*nodes))
    assume(before is not None)
    assert before is not None
    lost = data.draw(st.sampled_from(sorted(set(before.nodes.values()))))
    keep = {worker: name for worker, name in before.nodes.items() if name != lost}
    found = inventory(*(n for n in nodes if n["metadata"]["name"] != lost))
    after = quick(plan, found, keep=keep)
    if after is not None:
        assert keep.items() <= after.nodes.items()
        check(plan, inventory(*nodes), after)


@given(clusters(), plans, st.data())
@settings(max_examples=50, deadline=None)
def test_a_resize_moves_only_replicas_that_must(nodes: list[Any], plan: Plan, data: st.DataObject) -> None:
    old = quick(plan, inventory(*nodes))
    assume(old is not None)
    assert old is not None
    factor = data.draw(st.sampled_from([1, 2, 3]))
    size = data.draw(st.sampled_from([plan.layout.data, plan.layout.data * factor, max(1, plan.layout.data // 2)]))
    new = plan_of(plan.layout.tensor, plan.layout.pipeline, size, plan.gpus_per_worker)
    assume(new.layout.world_size % new.gpus_per_worker == 0)
    keep = keep_on_resize(plan, new, old.nodes)
    common = min(len(plan.workers), len(new.workers))
    assert {worker: old.nodes[worker] for worker in keep} == keep
    assert len(keep) == common


def test_a_healthy_replica_takes_the_index_of_a_broken_one_when_a_job_shrinks() -> None:
    nodes = {worker: f"n{worker}" for worker in range(6)}
    keep = keep_on_resize(plan_of(8, 2, 3, 8), plan_of(8, 2, 2, 8), nodes, frozenset({"n1"}))
    assert keep == {0: "n4", 1: "n5", 2: "n2", 3: "n3"}


def test_what_is_left_of_a_broken_replica_stays_when_no_other_can_take_its_index() -> None:
    nodes = {worker: f"n{worker}" for worker in range(4)}
    keep = keep_on_resize(plan_of(8, 2, 2, 8), plan_of(8, 2, 3, 8), nodes, frozenset({"n1"}))
    assert keep == {0: "n0", 2: "n2", 3: "n3"}


def test_other_degrees_keep_nothing() -> None:
    assert keep_on_resize(plan_of(8, 2, 2, 8), plan_of(8, 4, 1, 8), {0: "a"}) == {}


@given(clusters(), plans, st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_ranks_are_mapped_to_given_nodes_at_no_higher_cost(nodes: list[Any], plan: Plan, draw: Any) -> None:
    found = inventory(*nodes)
    first = tried(plan, found)
    assume(first is not None)
    assert first is not None
    shuffled = list(first.nodes.values())
    draw.shuffle(shuffled)
    given_map = dict(enumerate(shuffled))
    repaired = remap_ranks(plan, found, given_map, QUICK)
    assert Counter(repaired.nodes.values()) == Counter(shuffled)
    assert repaired.crossings.straddling_tensor_groups == 0
    given_cost = crossings(plan, {worker: found.nodes[name].place for worker, name in given_map.items()})
    assert given_cost.straddling_tensor_groups or repaired.cost <= given_cost.cost
    assert repaired.cost <= 1.1 * first.cost


def test_a_map_of_ranks_that_scatters_pipelines_is_put_right() -> None:
    found = inventory(*racks(2, 4, 8))
    scattered = {worker: f"rack{worker % 2}-node{worker // 2}" for worker in range(8)}
    repaired = remap_ranks(plan_of(8, 4, 2, 8), found, scattered)
    assert repaired.crossings.straddling_replicas == 0
    assert sorted(repaired.nodes.values()) == sorted(scattered.values())


def test_given_nodes_that_split_a_tensor_group_are_used_and_said() -> None:
    found = inventory(*(node(f"n{i}", gpus=4, rack="r") for i in range(4)))
    repaired = remap_ranks(plan_of(8, 1, 2, 4), found, {i: f"n{i}" for i in range(4)})
    assert repaired.crossings.straddling_tensor_groups == 2
    assert repaired.notes == ("2 tensor-parallel groups leave their NVLink domain, as allowed up to rack",)


def test_ranks_cannot_be_mapped_to_nodes_that_were_not_given() -> None:
    with pytest.raises(ValueError, match=r"workers \[1, 3\] were given no node"):
        remap_ranks(plan_of(8, 2, 2, 8), inventory(*racks(1, 4, 8)), {0: "rack0-node0", 1: "gone", 2: "rack0-node1"})


def test_replicas_split_sixteen_and_sixteen_over_racks_that_allow_eighteen() -> None:
    placement = place(plan_of(8, 1, 32, 8), inventory(*racks(2, 18, 8)))
    assert sorted(Counter(p.rack for p in placement.places.values()).values()) == [16, 16]


@given(st.integers(3, 18), st.integers(1, 18), st.sampled_from([1, 2]))
@settings(max_examples=20, deadline=None)
def test_racks_that_both_must_help_help_alike(free: int, half: int, stages: int) -> None:
    """Of two racks with as many free nodes each, a job too large for one takes as many replicas in both."""
    replicas = 2 * (half % (free // stages) + 1)
    assume(replicas * stages > free)
    placement = place(plan_of(8, stages, replicas, 8), inventory(*racks(2, free, 8)), options=QUICK)
    assert len(set(Counter(p.rack for p in placement.places.values()).values())) == 1
    assert placement.crossings.straddling_replicas == 0


def test_pipelines_are_balanced_too_where_that_costs_nothing() -> None:
    placement = place(plan_of(8, 2, 16, 8), inventory(*racks(2, 18, 8)))
    assert sorted(Counter(p.rack for p in placement.places.values()).values()) == [16, 16]
    assert placement.crossings.straddling_replicas == 0


def test_a_rack_that_is_not_needed_stays_whole() -> None:
    placement = place(plan_of(8, 4, 4, 8), inventory(*racks(4, 8, 8)))
    assert len({p.rack for p in placement.places.values()}) == 2


def test_spares_are_shared_out_by_what_racks_hold() -> None:
    nodes = inventory(*racks(3, 10, 8))
    placement = place(plan_of(8, 1, 16, 8), nodes)
    held = Counter(p.rack for p in placement.places.values())
    spares = spare_nodes(placement, nodes, 2)
    assert {nodes.nodes[name].place.rack for name in spares} == set(held)
    assert not set(spares) & set(placement.nodes.values())
    assert spare_nodes(placement, nodes, 0) == []
    assert len(spare_nodes(placement, nodes, 100)) == 14
    kept = with_spares(placement, nodes, 16)
    assert len(kept.to_status("j", {}).spares) == 14
    assert "14 of 16 spare nodes reserved: a worker fits on no other free node" in kept.notes


def test_a_node_that_runs_a_worker_is_no_spare_of_its_job() -> None:
    nodes = inventory(*racks(1, 3, 8))
    placement = place(plan_of(4, 1, 2, 4), nodes)
    assert len(set(placement.nodes.values())) == 1
    assert not set(spare_nodes(placement, nodes, 3)) & set(placement.nodes.values())


def test_one_kind_of_gpu_is_used_where_one_has_room_and_a_mix_is_said() -> None:
    label = "nvidia.com/gpu.product"
    kinds = [node(f"h{i}", labels={label: "NVIDIA-H100-80GB-HBM3"}) for i in range(2)]
    kinds += [node(f"a{i}", labels={label: "NVIDIA-A100-SXM4-80GB"}) for i in range(3)]
    alone = place(plan_of(8, 1, 3, 8), inventory(*kinds))
    assert set(alone.nodes.values()) == {"a0", "a1", "a2"}
    mixed = place(plan_of(8, 1, 4, 8), inventory(*kinds))
    assert "different GPU products" in mixed.notes[0]
    again = place(plan_of(8, 1, 2, 8), inventory(*kinds), {0: "h0"})
    assert again.nodes[1] == "h1"


def test_a_tensor_group_may_leave_its_host_only_when_told_to() -> None:
    found = inventory(*(node(f"n{i}", gpus=4, rack=f"r{i // 2}") for i in range(4)))
    with pytest.raises(DoesNotFitError):
        place(plan_of(8, 1, 2, 4), found)
    wider = place(plan_of(8, 1, 2, 4), found, options=PlacingOptions(tensor_within="rack"))
    assert wider.crossings.straddling_tensor_groups == 2
    assert [wider.places[w].rack for w in range(4)] == ["r0", "r0", "r1", "r1"]
    with pytest.raises(ValueError, match="`tensor_within` is 'row'.*domain, rack, zone"):
        place(plan_of(8, 1, 2, 4), found, options=PlacingOptions(tensor_within="row"))


def test_a_previous_placement_that_is_no_longer_possible_is_forgotten() -> None:
    found = inventory(*racks(1, 2, 8))
    assert place(plan_of(8, 2, 1, 8), found, previous={0: "gone", 1: "rack0-node0"}).cost == 1
    assert place(plan_of(8, 2, 1, 8), found, previous={0: "rack0-node0", 1: "rack0-node0"}).cost == 1


def test_a_lost_node_of_a_large_job_is_replaced_in_its_rack() -> None:
    found = inventory(*racks(16, 32, 8))
    plan = plan_of(8, 4, 120, 8)
    nodes = place(plan, found, options=QUICK).nodes
    keep = {worker: name for worker, name in nodes.items() if worker != 7}
    gone = Inventory({n: v for n, v in found.nodes.items() if n != nodes[7]}, (), found.levels)
    after = place(plan, gone, keep)
    assert keep.items() <= after.nodes.items()
    before = place(plan, found, previous=nodes, options=QUICK)
    assert after.crossings.extra_places[Dimension.PIPELINE]["zone"] == 0
    assert after.cost <= before.cost + 5


def test_tensor_groups_without_nvlink_are_said_with_what_that_costs() -> None:
    label = {"nvidia.com/gpu.product": "NVIDIA-L40S"}
    found = inventory(*(node(f"n{i}", labels=label) for i in range(2)))
    notes = place(plan_of(4, 1, 2, 4), found).notes
    assert len(notes) == 1
    assert "over PCIe inside a node: 24 GB/s for a NVIDIA-L40S" in notes[0]
    assert place(plan_of(1, 1, 2, 1), found).notes == ()


def test_fragmentation_has_a_price() -> None:
    busy = tuple(pod(f"p{r}{n}", gpus=8, on=f"rack{r}-node{n}") for r in range(2) for n in range(2))
    found = inventory(*racks(2, 4, 8), pods=busy)
    placement = place(plan_of(8, 4, 1, 8), found)
    assert placement.crossings.straddling_replicas == 1
    assert cost_of_fragmentation(placement, found) == 4
    assert cost_of_fragmentation(place(plan_of(8, 2, 1, 8), found), found) == 0


def test_the_nodes_to_free_are_those_that_hold_least() -> None:
    busy = (pod("large", gpus=6, on="rack0-node0"), pod("small", gpus=1, on="rack0-node2"))
    found = inventory(*racks(1, 3, 8), pods=busy)
    plan = plan_of(8, 1, 2, 8)
    asked = nodes_to_free(plan, found)
    assert asked is not None
    assert (list(asked.nodes), asked.gpus, asked.workers) == (["rack0-node2"], 1, 1)
    freed = place(plan, inventory(*racks(1, 3, 8), pods=busy[:1]))
    assert set(freed.nodes.values()) == {"rack0-node1", "rack0-node2"}
    assert nodes_to_free(plan_of(8, 1, 1, 8), found) is None
    assert nodes_to_free(plan_of(8, 1, 4, 8), found) is None
