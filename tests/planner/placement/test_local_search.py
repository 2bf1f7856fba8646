"""The search behind placements: groups as they are, bounds that hold, and the costs it must reach."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshwright.layout import Layout
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.placement import PlacingOptions, place
from meshwright.planner.placement.bins import DomainBins
from meshwright.planner.placement.capacity import FreeCapacity, GangShape
from meshwright.planner.placement.lower_bound import lower_bound
from meshwright.planner.placement.rank_blocks import Dimension, RankBlocks
from meshwright.planner.placement.weights import GroupTraffic, Weights
from meshwright.planner.topology.links import Links
from tests.planner.builders import inventory, node, plan_of, racks
from tests.tiers import mostly_long

RACKS_ONLY = Weights({Dimension.PIPELINE: {"domain": 0, "rack": 3}, Dimension.DATA: {"domain": 0, "rack": 1}})


def of_racks(free: list[int] | tuple[int, ...], spine: int = 0) -> Inventory:
    """So many nodes of 8 GPUs in each rack; with `spine` so many racks under each spine."""
    key = "network.topology.nvidia.com/spine"
    return inventory(
        *(
            node(f"r{r}n{i:02d}", rack=f"r{r}", labels={key: f"s{r // spine}"} if spine else None)
            for r, count in enumerate(free)
            for i in range(count)
        )
    )


def ranks_by_definition(mesh: RankBlocks, dimension: Dimension) -> Counter[frozenset[int]]:
    """The blocks each group touches, straight from the order [TP, CP, PP, DP]."""
    found: dict[tuple[int, ...], set[int]] = {}
    for rank in range(mesh.world_size):
        rest, tensor = divmod(rank, mesh.tensor)
        rest, context = divmod(rest, mesh.context)
        data, pipeline = divmod(rest, mesh.pipeline)
        key = {
            Dimension.CONTEXT: (data, pipeline, tensor),
            Dimension.PIPELINE: (data, context, tensor),
            Dimension.DATA: (pipeline, tensor),
            Dimension.EXPERT: ((data * mesh.context + context) // mesh.expert, pipeline, tensor),
        }[dimension]
        found.setdefault(key, set()).add(rank // mesh.block_gpus)
    return Counter(frozenset(blocks) for blocks in found.values() if len(blocks) > 1)


degrees = st.sampled_from([1, 2, 4])


@given(degrees, degrees, degrees, degrees, degrees, degrees)
@settings(max_examples=80, deadline=None)
def test_groups_touch_the_blocks_that_the_rank_order_says(t: int, c: int, p: int, d: int, e: int, gpus: int) -> None:
    assume(d * c % e == 0 and t * c * p * d % max(t, gpus) == 0)
    mesh = RankBlocks(t, c, p, d, e, gpus)
    for dimension in Dimension:
        found = Counter({frozenset(g.blocks): g.count for g in mesh.groups() if g.dimension is dimension})
        expected = ranks_by_definition(mesh, dimension)
        assert {blocks: count // mesh.tensor for blocks, count in expected.items()} == dict(found)


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"expert": 3, "data": 4}, "expert"), ({"tensor": 0}, "tensor"), ({"gpus_per_worker": 8, "data": 4}, "4 ranks")],
)
def test_a_mesh_that_contradicts_itself_is_refused(fields: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RankBlocks(**fields)


INSTANCES = [
    (4, 4, (6, 5, 4, 3), 13),
    (8, 4, (10, 9, 8, 7, 4), 15),
    (8, 8, (18, 15, 13, 11, 9, 8), 35),
    (16, 8, (30, 28, 24, 20, 18, 16), 43),
    (16, 16, (50, 46, 40, 38, 34, 30, 28), 89),
]


@pytest.mark.parametrize(
    ("replicas", "stages", "free", "known"), mostly_long(INSTANCES, lambda case: case[0] * case[1] <= 64)
)
def test_the_least_known_cost_of_two_sided_instances_is_reached(
    replicas: int, stages: int, free: tuple[int, ...], known: int
) -> None:
    effort = 5_000_000 if replicas * stages > 128 else 1_500_000
    found = place(plan_of(8, stages, replicas, 8), of_racks(free), options=PlacingOptions(RACKS_ONLY, effort=effort))
    assert found.cost <= known
    assert found.bound <= found.cost
    assert found.gap is not None
    assert found.gap <= 0.12


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2))
@settings(max_examples=50, deadline=None)
def test_no_placement_costs_less_than_the_bound(free: list[int], stages: int, replicas: int, spine: int) -> None:
    plan, found = plan_of(8, stages, replicas, 8), of_racks(free, spine)
    blocks = stages * replicas
    assume(blocks <= sum(free) and len(free) ** blocks <= 5000)
    domain_bins = DomainBins(GangShape(plan).mesh, FreeCapacity(plan, found, {}), {}, found.levels, Weights())
    problem = domain_bins.problem
    best = float("inf")
    for choice in itertools.product(range(len(problem.bins)), repeat=blocks):
        used = Counter(choice)
        if all(count <= problem.bins[j].capacity for j, count in used.items()):
            best = min(best, problem.cost(choice))
    assert lower_bound(problem) <= best + 1e-6
    placement = place(plan, found)
    assert placement.cost == pytest.approx(best + domain_bins.constant)
    assert placement.bound <= placement.cost


def test_a_bound_is_exact_where_whole_replicas_fill_racks() -> None:
    placement = place(plan_of(8, 4, 8, 8), of_racks([8, 8, 8, 8]))
    assert placement.gap == 0


def test_more_effort_never_costs_more() -> None:
    plan, found = plan_of(8, 8, 8, 8), of_racks((18, 15, 13, 11, 9, 8))
    costs = [place(plan, found, options=PlacingOptions(effort=effort)).cost for effort in (0, 20_000, 400_000)]
    assert costs == sorted(costs, reverse=True)


def wide(mesh: RankBlocks) -> PlacingOptions:
    return PlacingOptions(mesh=mesh)


def placed(mesh: RankBlocks, found: Inventory, options: PlacingOptions | None = None) -> Any:
    plan = plan_of(mesh.tensor, mesh.pipeline, mesh.data * mesh.context, mesh.gpus_per_worker)
    return place(plan, found, options=options or wide(mesh))


def test_context_groups_wider_than_a_node_stay_in_a_rack() -> None:
    found = placed(RankBlocks(tensor=8, context=16, data=3, gpus_per_worker=8), of_racks([20, 20, 20]))
    assert found.crossings.extra_places[Dimension.CONTEXT]["rack"] == 0
    assert found.crossings.straddling_tensor_groups == 0


def test_expert_groups_wider_than_a_node_stay_in_a_rack_beside_pipelines() -> None:
    mesh = RankBlocks(tensor=1, pipeline=8, data=128, expert=64, gpus_per_worker=8)
    found = placed(mesh, of_racks([64, 70]))
    assert found.crossings.extra_places[Dimension.EXPERT]["rack"] == 0
    assert found.crossings.extra_places[Dimension.EXPERT]["domain"] > 0


def test_expert_groups_inside_an_nvl72_never_touch_the_network() -> None:
    trays = [
        node(f"t{r}-{i:02d}", gpus=4, rack=f"rack{r}", labels={"nvidia.com/gpu.clique": f"c{r}.1"})
        for r in (0, 1)
        for i in range(18)
    ]
    found = placed(RankBlocks(tensor=4, data=32, expert=16, gpus_per_worker=4), inventory(*trays))
    assert found.crossings.extra_places[Dimension.EXPERT] == {"domain": 0, "rack": 0, "zone": 0}


def test_a_mesh_of_another_world_is_refused() -> None:
    with pytest.raises(ValueError, match="`mesh` has 4 ranks.*the plan 8"):
        place(plan_of(2, 2, 2, 2), inventory(*racks(2, 2, 2)), options=wide(RankBlocks(2, 1, 2, 1, 1, 2)))


def test_traffic_decides_what_is_kept_close() -> None:
    links = Links(("domain", "rack", "zone"), inside=450e9, nic=50e9)
    found = of_racks([4, 4])
    plan = plan_of(8, 4, 2, 8)
    pipelines = place(plan, found, options=PlacingOptions(Weights.from_traffic(GroupTraffic(pipeline=1e9), links)))
    replicas = place(plan, found, options=PlacingOptions(Weights.from_traffic(GroupTraffic(data=1e9), links)))
    assert pipelines.crossings.extra_places[Dimension.PIPELINE]["rack"] == 0
    assert replicas.crossings.extra_places[Dimension.DATA]["rack"] == 0
    assert replicas.crossings.straddling_replicas == 2


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="data groups at level rack is -1"):
        Weights({Dimension.DATA: {"rack": -1}})


def test_layouts_have_no_groups_that_a_mesh_invents() -> None:
    assert RankBlocks.of(Layout(8, 1, 1), 8).groups() == ()
