"""Placement: what must hold always (properties), and what people would expect (cases)."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.placement import Placement, PlacingOptions, place
from meshwright.planner.placement.capacity import FreeCapacity, GangShape
from meshwright.planner.placement.objective import crossings
from meshwright.planner.placement.rank_blocks import Dimension
from meshwright.planner.placement.weights import Weights
from meshwright.planner.plan import Plan
from tests.planner.builders import ZONE, inventory, node, plan_of, pod, racks

SIZES = [(1, 1, 1), (2, 1, 1), (2, 2, 2), (1, 2, 2), (2, 3, 2), (4, 2, 4), (4, 1, 2), (4, 2, 2), (8, 2, 4), (2, 1, 4)]


@st.composite
def clusters(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Up to 2 zones, 3 racks each, 3 domains each, 2 nodes each, of unequal sizes."""
    nodes: list[dict[str, Any]] = []
    for zone in range(draw(st.integers(1, 2))):
        for rack in range(draw(st.integers(1, 3))):
            for domain in range(draw(st.integers(1, 3))):
                place_name = f"z{zone}r{rack}d{domain}"
                for index in range(draw(st.integers(1, 2))):
                    gpus = draw(st.integers(1, 8))
                    nodes.append(
                        node(
                            f"{place_name}n{index}",
                            gpus=gpus,
                            rack=f"z{zone}r{rack}",
                            domain=place_name,
                            zone=f"z{zone}",
                        )
                    )
    return nodes


plans = st.builds(
    lambda size, data: (
        plan_of(size[0], size[1], data, size[2])
        if size[0] * size[1] * data % size[2] == 0
        else plan_of(size[0], size[1], data * size[2], size[2])
    ),
    st.sampled_from(SIZES),
    st.integers(1, 4),
)


def tried(plan: Plan, nodes: Inventory, keep: dict[int, str] | None = None) -> Placement | None:
    """The placement, or None where there is no room."""
    try:
        return place(plan, nodes, keep)
    except DoesNotFitError:
        return None


def check(plan: Plan, nodes: Inventory, placement: Placement) -> None:
    """Capacity is respected and no tensor-parallel group leaves its NVLink domain."""
    assert sorted(placement.nodes) == list(range(len(plan.workers)))
    for name, count in Counter(placement.nodes.values()).items():
        assert count * plan.gpus_per_worker <= nodes.nodes[name].free.gpus
    worker_of = {rank: worker for worker, ranks in enumerate(plan.workers) for rank in ranks}
    for group in plan.layout.tensor_groups():
        assert len({nodes.nodes[placement.nodes[worker_of[rank]]].place.domain for rank in group}) == 1
    assert placement.crossings.straddling_tensor_groups == 0


@given(clusters(), plans)
@settings(max_examples=60, deadline=None)
def test_capacity_is_respected_and_tensor_groups_stay_in_their_domain(nodes: list[Any], plan: Plan) -> None:
    found = inventory(*nodes)
    placement = tried(plan, found)
    if placement is not None:
        check(plan, found, placement)


@given(clusters(), plans)
@settings(max_examples=60, deadline=None)
def test_it_fits_exactly_when_the_domains_have_room_for_every_block(nodes: list[Any], plan: Plan) -> None:
    found = inventory(*nodes)
    block_gpus = max(plan.layout.tensor, plan.gpus_per_worker)
    by_domain: Counter[str] = Counter()
    for n in found.usable:
        by_domain[n.place.domain] += n.free.gpus // plan.gpus_per_worker * plan.gpus_per_worker
    room = sum(gpus // block_gpus for gpus in by_domain.values())
    assert (tried(plan, found) is not None) == (room * block_gpus >= plan.layout.world_size)


@given(clusters(), plans, st.data())
@settings(max_examples=80, deadline=None)
def test_kept_workers_stay_and_the_rest_still_fits_the_rules(nodes: list[Any], plan: Plan, data: st.DataObject) -> None:
    found = inventory(*nodes)
    first = tried(plan, found)
    if first is None:
        return
    lost = data.draw(st.sets(st.sampled_from(sorted(first.nodes)), max_size=3))
    keep = {worker: name for worker, name in first.nodes.items() if worker not in lost}
    again = place(plan, found, keep)
    check(plan, found, again)
    assert keep.items() <= again.nodes.items()


@given(clusters(), plans)
@settings(max_examples=50, deadline=None)
def test_the_same_objects_in_any_order_give_the_same_placement(nodes: list[Any], plan: Plan) -> None:
    one, other = tried(plan, inventory(*nodes)), tried(plan, inventory(*reversed(nodes)))
    assert (one and one.nodes) == (other and other.nodes)


@given(clusters(), plans, st.integers(1, 8), st.sampled_from(["z0r0", "z0r9"]))
@settings(max_examples=60, deadline=None)
def test_adding_a_node_never_makes_more_replicas_straddle(nodes: list[Any], plan: Plan, gpus: int, rack: str) -> None:
    nodes = [n for n in nodes if n["metadata"]["labels"][ZONE] == "z0"]
    before = tried(plan, inventory(*nodes))
    after = tried(plan, inventory(*nodes, node("extra", gpus=gpus, rack=rack, zone="z0")))
    if before is not None:
        assert after is not None
        assert after.crossings.straddling_replicas <= before.crossings.straddling_replicas


def cheapest(plan: Plan, found: Inventory) -> float:
    """By trying everything: the lowest cost of any placement."""
    shape, room = GangShape(plan), FreeCapacity(plan, found, {})
    domains = [name for name in room.domains if room.blocks(name)]
    best = float("inf")
    for choice in itertools.product(domains, repeat=shape.blocks):
        used = Counter(choice)
        if all(count <= room.blocks(domain) for domain, count in used.items()):
            places = {w: room.domains[d] for block, d in enumerate(choice) for w in shape.workers_of(block)}
            best = min(best, crossings(plan, places).cost)
    return best


def test_cost_is_within_two_percent_of_the_exact_optimum_over_many_small_clusters() -> None:
    draw = random.Random(7)
    found_cost = best_cost = 0.0
    tried_count = optimal = 0
    while tried_count < 150:
        nodes = [
            node(f"r{r}d{d}n{n}", gpus=draw.randint(1, 8), rack=f"r{r}", domain=f"r{r}d{d}", zone=f"z{r % 2}")
            for r in range(draw.randint(1, 3))
            for d in range(draw.randint(1, 2))
            for n in range(draw.randint(1, 2))
        ]
        tensor, pipeline, per_worker = draw.choice(SIZES[2:])
        plan = plan_of(tensor, pipeline, draw.choice([1, 2]), per_worker)
        if plan.layout.world_size % per_worker:
            continue
        found = inventory(*nodes)
        placement = tried(plan, found) if 2 <= GangShape(plan).blocks <= 4 else None
        if placement is not None:
            best = cheapest(plan, found)
            tried_count += 1
            optimal += placement.cost == best
            found_cost, best_cost = found_cost + placement.cost, best_cost + best
    assert found_cost <= 1.02 * best_cost
    assert optimal >= 0.95 * tried_count


def test_stages_are_on_two_small_nodes_although_a_larger_one_takes_both() -> None:
    """Two pipelines of 4 on nodes of 2, 2, 2, 1 and 1 in one zone: the fifth node, with 4, is in another."""
    near = [node(f"n{index}", gpus=2, rack="r0", domain=f"d{index}", zone="z0") for index in range(3)]
    small = [node("n3", gpus=1, rack="r0", domain="d3", zone="z0"), node("n4", gpus=1, rack="r1", zone="z0")]
    far = node("n5", gpus=4, rack="r2", domain="d5", zone="z1")
    assert place(plan_of(1, 4, 2, 1), inventory(*near, *small, far)).cost == 8


@cache
def fewest_pieces(groups: int, size: int, rooms: tuple[int, ...]) -> int | None:
    """By trying everything: the fewest bins beyond the first that groups use, summed; None when they do not fit."""
    if groups == 0:
        return 0
    best: int | None = None
    for pieces in itertools.product(*(range(min(room, size) + 1) for room in rooms)):
        if sum(pieces) != size:
            continue
        left = tuple(sorted(room - piece for room, piece in zip(rooms, pieces, strict=True)))
        rest = fewest_pieces(groups - 1, size, left)
        if rest is not None:
            cost = rest + sum(1 for piece in pieces if piece) - 1
            best = cost if best is None else min(best, cost)
    return best


ONLY_PIPELINE = PlacingOptions(Weights({Dimension.PIPELINE: {"domain": 0, "rack": 1}}))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_replicas_leave_racks_as_little_as_brute_force_finds(rooms: list[int], stages: int, replicas: int) -> None:
    nodes = [node(f"r{r}n{i}", gpus=2, rack=f"r{r}") for r, room in enumerate(rooms) for i in range(room)]
    plan = plan_of(2, stages, replicas, 2)
    try:
        placement = place(plan, inventory(*nodes), options=ONLY_PIPELINE)
    except DoesNotFitError:
        placement = None
    expected = fewest_pieces(replicas, stages, tuple(sorted(rooms)))
    assert (placement.cost if placement else None) == expected


def test_the_demo_cluster_gets_a_replica_in_each_rack() -> None:
    placement = place(plan_of(2, 2, 2, 2), inventory(*racks(2, 2, 2)))
    assert placement.nodes == {0: "rack0-node0", 1: "rack0-node1", 2: "rack1-node0", 3: "rack1-node1"}
    assert placement.crossings.straddling_replicas == 0


def test_a_job_that_fits_one_rack_leaves_the_larger_rack_whole() -> None:
    nodes = [*racks(1, 4, 8), *(node(f"small{i}", gpus=8, rack="small") for i in range(2))]
    placement = place(plan_of(8, 2, 1, 8), inventory(*nodes))
    assert set(placement.nodes.values()) == {"small0", "small1"}
    assert placement.cost == 1


def test_small_workers_fill_a_broken_domain_before_a_whole_one() -> None:
    busy = (pod("other", gpus=4, on="rack0-node1"),)
    placement = place(plan_of(2, 2, 1, 2), inventory(*racks(1, 3, 8), pods=busy))
    assert set(placement.nodes.values()) == {"rack0-node1"}
    assert placement.cost == 0


def test_replicas_are_spread_evenly_over_the_racks_they_need() -> None:
    placement = place(plan_of(2, 1, 6, 2), inventory(*racks(3, 4, 2)))
    counts = Counter(place.rack for place in placement.places.values())
    assert sorted(counts.values()) == [3, 3]


def test_workers_of_one_tensor_group_share_a_wide_domain() -> None:
    trays = [node(f"tray{i}", gpus=4, domain=f"nvl{i // 2}", rack="r") for i in range(4)]
    placement = place(plan_of(8, 1, 2, 4), inventory(*trays))
    assert [placement.places[w].domain for w in range(4)] == ["nvl0", "nvl0", "nvl1", "nvl1"]


def test_a_zone_that_holds_the_job_is_preferred_to_two() -> None:
    nodes = [
        node(f"{z}{i}", gpus=8, rack=f"{z}r{i}", zone=z) for z, count in (("a", 1), ("b", 2)) for i in range(count)
    ]
    placement = place(plan_of(8, 1, 2, 8), inventory(*nodes))
    assert {p.zone for p in placement.places.values()} == {"b"}


def test_a_replaced_worker_goes_to_its_replicas_rack() -> None:
    nodes = [*racks(2, 2, 8), node("spare0", rack="rack0"), node("spare1", rack="rack1"), node("aaa", rack="far")]
    keep = {0: "rack0-node0", 1: "rack0-node1", 2: "rack1-node0"}
    gone = [n for n in nodes if n["metadata"]["name"] != "rack1-node1"]
    placement = place(plan_of(8, 2, 2, 8), inventory(*gone), keep)
    assert placement.nodes == keep | {3: "spare1"}


def test_a_whole_lost_replica_goes_to_a_rack_the_job_is_in() -> None:
    nodes = [node("aaa", rack="another"), node("bbb", rack="used"), node("n0", rack="used")]
    placement = place(plan_of(8, 1, 2, 8), inventory(*nodes), {0: "n0"})
    assert placement.nodes[1] == "bbb"


def test_workers_stay_on_a_cordoned_node_but_none_is_added_there() -> None:
    nodes = [node("n0", unschedulable=True), node("n1"), node("n2")]
    placement = place(plan_of(4, 2, 1, 4), inventory(*nodes), {0: "n0"})
    assert placement.nodes[0] == "n0"
    assert placement.nodes[1] in ("n1", "n2")
    assert placement.places[0].rack == "rack0"


def test_a_node_that_is_gone_is_a_place_of_its_own() -> None:
    placement = place(plan_of(4, 2, 1, 4), inventory(node("n1")), {0: "vanished"})
    assert placement.nodes == {0: "vanished", 1: "n1"}
    assert placement.crossings.straddling_replicas == 1


def test_the_message_says_what_is_short_and_what_would_fit() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        place(plan_of(2, 2, 2, 2), inventory(*racks(2, 2, 2), pods=(pod("other", gpus=1, on="rack1-node1"),)))
    assert str(caught.value) == (
        "3 of 4 workers with 2 GPUs each fit (rack0: 2, rack1: 1): 2 GPUs missing. "
        "Free 2 GPUs, or set `spec.replicas: 1` to start now"
    )
    assert (caught.value.unplaced_workers, caught.value.replicas_that_fit) == (1, 1)
    assert not caught.value.blocked_by_kept_workers


def fit_message(plan: Plan, nodes: Inventory) -> str:
    with pytest.raises(DoesNotFitError) as caught:
        place(plan, nodes)
    return str(caught.value)


def free_by_node(*free: int) -> Inventory:
    """Nodes of 8 GPUs each, of which this many are free."""
    nodes = [node(f"n{i}", gpus=8) for i in range(len(free))]
    return inventory(*nodes, pods=tuple(pod(f"p{i}", gpus=8 - gpus, on=f"n{i}") for i, gpus in enumerate(free)))


def test_workers_of_fewer_gpus_that_fit_in_the_gaps_are_suggested() -> None:
    assert fit_message(plan_of(1, 1, 16, 8), free_by_node(4, 6, 4, 5)) == (
        "0 of 2 workers with 8 GPUs each fit: 16 GPUs missing. Free 16 GPUs, or set `spec.workers.gpusPerWorker: 4` to "
        "start now"
    )
    message = fit_message(plan_of(1, 1, 16, 8), free_by_node(8, 4, 2, 2))
    assert message.endswith("Free 8 GPUs, or set `spec.workers.gpusPerWorker: 2` or `spec.replicas: 8` to start now"), (
        message
    )


def test_workers_of_fewer_gpus_have_complete_tensor_groups_and_the_same_memory() -> None:
    message = fit_message(plan_of(4, 1, 4, 8), free_by_node(3, 3, 3, 3, 3, 3))
    assert message.endswith("No smaller number of replicas fits now"), message
    plan = plan_of(1, 1, 16, 8)
    greedy = replace(plan, worker_request=replace(plan.worker_request, cpu_milli=60_000))
    message = fit_message(greedy, free_by_node(4, 6, 4, 5))
    assert "gpusPerWorker: 4" in message, "each node has one worker"
    message = fit_message(greedy, free_by_node(4, 6, 2))
    assert message.endswith(
        "Free 16 GPUs, or set `spec.workers.gpusPerWorker: 4` and `spec.replicas: 8` to start now"
    ), message
    message = fit_message(plan_of(1, 4, 2, 8), free_by_node(3, 2))
    assert message.endswith("or set `spec.workers.gpusPerWorker: 2` and `spec.replicas: 1` to start now"), message


def test_workers_of_fewer_gpus_are_suggested_for_a_cluster_of_different_nodes() -> None:
    mixed = inventory(node("n0", gpus=8), *(node(f"m{i}", gpus=4) for i in range(2)))
    message = fit_message(plan_of(1, 1, 16, 8), mixed)
    assert message.endswith("Add nodes, or set `spec.workers.gpusPerWorker: 4` or `spec.replicas: 8` to start now")


def test_a_job_that_is_larger_than_its_cluster_is_not_told_to_free_gpus() -> None:
    """Without any other pod, 3 workers would fit: 2 GPUs too few."""
    message = fit_message(plan_of(2, 2, 2, 2), inventory(*racks(2, 2, 2)[:3]))
    assert message == (
        "3 of 4 workers with 2 GPUs each fit (rack0: 2, rack1: 1): 2 GPUs missing. Freeing GPUs is not enough: the job "
        "needs 8 GPUs, and without any other pod 3 of its 4 workers (6 GPUs) fit on the usable nodes. Add nodes, or "
        "set `spec.replicas: 1` to start now"
    )


def test_a_job_that_is_larger_than_its_busy_cluster_reads_what_fits_now_and_on_empty_nodes() -> None:
    busy = inventory(*racks(1, 3, 2), pods=(pod("other", gpus=1, on="rack0-node1"),))
    message = fit_message(plan_of(2, 1, 4, 2), busy)
    assert "the job needs 8 GPUs, and without any other pod 3 of its 4 workers (6 GPUs) fit" in message
    assert message.endswith(
        "set `spec.replicas: 2` to start now, or `spec.replicas: 3`, the most that fits without other pods"
    )
    full = inventory(*racks(1, 1, 2), pods=(pod("other", gpus=1, on="rack0-node0"),))
    message = fit_message(plan_of(2, 1, 4, 2), full)
    assert message.endswith("Add nodes, or set `spec.replicas: 1`, the most that fits without other pods")


def test_a_replica_that_is_larger_than_the_cluster_reads_the_degrees_to_lower() -> None:
    message = fit_message(plan_of(2, 4, 2, 2), inventory(*racks(1, 3, 2)))
    assert message.endswith("Add nodes, or lower the degrees: one replica (TP 2 x PP 4) needs 8 GPUs")
    assert "Free " not in message
    # Experts are spread over two replicas, so one alone, which would fit, cannot run.
    plan = plan_of(1, 2, 4, 2)
    spread = replace(plan, strategy=replace(plan.strategy, expert=2))
    message = fit_message(spread, inventory(*racks(1, 1, 2)))
    assert message.endswith("Add nodes, or lower the degrees: the fewest replicas, 2 of TP 1 x PP 2, EP 2, need 4 GPUs")


def test_excluded_nodes_count_when_a_job_is_compared_with_its_cluster() -> None:
    nodes = [node("n0", gpus=2, unschedulable=True), node("n1", gpus=2)]
    message = fit_message(plan_of(2, 1, 2, 2), inventory(*nodes))
    assert "Excluded nodes: n0 (cordoned). Free 2 GPUs, or set `spec.replicas: 1` to start now" in message
    message = fit_message(plan_of(2, 1, 3, 2), inventory(*nodes))
    assert "2 of its 3 workers (4 GPUs) fit on all nodes, with the excluded ones" in message
    assert message.endswith(
        "set `spec.replicas: 1` to start now, or `spec.replicas: 2`, the most that fits without other pods"
    )


def test_the_message_names_nodes_that_are_left_out() -> None:
    nodes = [node("n0", gpus=2, unschedulable=True), node("n1", gpus=2)]
    with pytest.raises(DoesNotFitError, match=r"Excluded nodes: n0 \(cordoned\)\. Free 2 GPUs$"):
        place(plan_of(2, 2, 1, 2), inventory(*nodes))


def test_nothing_is_to_be_freed_if_no_node_is_usable() -> None:
    message = fit_message(
        plan_of(1, 1, 2, 2), inventory(*(node(f"n{i}", gpus=2, unschedulable=True) for i in range(5)))
    )
    assert message == (
        "0 of 1 worker with 2 GPUs fits: 2 GPUs missing. Excluded nodes: 5 (5 cordoned). "
        "No node is usable: correct what excludes them, or add nodes"
    )


def test_the_message_counts_reasons_when_many_nodes_are_left_out() -> None:
    nodes = [node(f"n{i}", gpus=2, unschedulable=True) for i in range(5)]
    with pytest.raises(DoesNotFitError, match=r"Excluded nodes: 5 \(5 cordoned\)"):
        place(plan_of(2, 1, 1, 2), inventory(*nodes))


def test_a_tensor_group_over_workers_needs_one_domain_and_the_message_says_so() -> None:
    with pytest.raises(DoesNotFitError, match=r"Each tensor-parallel group needs 2 workers in one NVLink domain"):
        place(plan_of(4, 1, 1, 2), inventory(node("n0", gpus=2), node("n1", gpus=2)))


def test_a_worker_that_cannot_rejoin_its_group_says_that_a_fresh_start_would_fit() -> None:
    trays = [node("a0", gpus=4, domain="a"), *(node(f"b{i}", gpus=4, domain="b") for i in range(2))]
    with pytest.raises(DoesNotFitError, match="It would fit if all workers were placed again") as caught:
        place(plan_of(8, 1, 1, 4), inventory(*trays), {0: "a0"})
    assert caught.value.blocked_by_kept_workers
    assert caught.value.unplaced_workers == 1


def test_cpu_and_memory_limit_too_and_the_message_says_so() -> None:
    plan = plan_of(2, 1, 2, 2)
    greedy = Plan(plan.strategy, 2, type(plan.worker_request)(gpus=2, cpu_milli=40_000, pods=1))
    with pytest.raises(DoesNotFitError, match="Counting only GPUs, 4 workers fit: 1 node with too little cpu"):
        place(greedy, inventory(node("n0", gpus=8)))


def test_gpus_of_the_workers_that_run_are_not_counted_as_free() -> None:
    """A node was lost, and no GPU is free: neither CPU nor memory is missing."""
    nodes = inventory(*(node(f"n{i}", gpus=2) for i in range(3)))
    with pytest.raises(DoesNotFitError, match="0 of 1 worker with 2 GPUs fits next to the 3 that run") as caught:
        place(plan_of(2, 1, 4, 2), nodes, {worker: f"n{worker}" for worker in range(3)})
    assert "Counting only GPUs" not in str(caught.value)


def test_thousands_of_nodes_are_placed_in_seconds() -> None:
    nodes = inventory(*racks(64, 32, 8))
    placement = place(plan_of(8, 8, 100, 8), nodes)
    assert placement.crossings.straddling_replicas == 0
    assert GangShape(placement.plan).segments == 100
    assert FreeCapacity(placement.plan, nodes, {}).total_blocks() == 2048


def test_status_lists_every_worker_with_ranks_and_pod() -> None:
    placement = place(plan_of(2, 2, 2, 2), inventory(*racks(2, 2, 2)))
    status = placement.to_status("lm", {2: 3})
    assert [w.ranks for w in status.workers] == ["0-1", "2-3", "4-5", "6-7"]
    assert [w.pod for w in status.workers] == ["lm-w0-0", "lm-w1-0", "lm-w2-3", "lm-w3-0"]
    assert [w.rack for w in status.workers] == ["rack0", "rack0", "rack1", "rack1"]
    assert status.cost == "4"
    assert status.straddling_replicas == 0
