"""Collectives against their closed forms, NCCL's tuner, and measurements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.cost.accelerators import ACCELERATORS, accelerator
from meshwright.planner.cost.collectives import (
    LINK_EFFICIENCY,
    NETWORK_EFFICIENCY,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    ring_latency,
    send,
    tree_latency,
)
from meshwright.planner.cost.comm_groups import RankOrder, group_spans
from meshwright.planner.cost.fabric import BASE_LATENCY, INTER_LATENCY, Fabric, FabricLevel, Span
from meshwright.planner.cost.strategy import Strategy

H100 = ACCELERATORS["H100-SXM5-80GB"]
NODES = Fabric.of(H100)
GIGABYTE = 1e9

# H100, 400 Gb/s per GPU: nodes, ranks per node, all-gather latency in us and algorithm bandwidth in GB/s as NCCL
# 2.27's tuner predicts them.
TUNER = [
    (2, 1, 22.4, 96.0),
    (2, 4, 42.8, 219.4),
    (2, 8, 70.0, 409.6),
    (4, 1, 50.4, 64.0),
    (4, 8, 145.6, 396.4),
    (8, 1, 106.4, 54.9),
    (8, 2, 133.6, 102.4),
    (16, 4, 381.6, 195.0),
    (32, 1, 442.4, 49.5),
    (32, 8, 1204.0, 385.5),
]


@pytest.mark.parametrize(("nodes", "per_node", "latency", "bandwidth"), TUNER)
def test_gathers_are_as_nccls_tuner_predicts(nodes: int, per_node: int, latency: float, bandwidth: float) -> None:
    span = Span((per_node, nodes * per_node))
    assert ring_latency(span, NODES) * 1e6 == pytest.approx(latency, rel=0.01)
    without_latency = all_gather(GIGABYTE, span, NODES) - ring_latency(span, NODES)
    assert GIGABYTE / without_latency / 1e9 == pytest.approx(bandwidth, rel=0.08)


# A100 inside a node, measured: GPUs, alpha in us, bus bandwidth in GB/s, of which 2 (n-1)/n X is moved.
MEASURED = [(2, 46, 193.0), (4, 54, 218.0), (8, 79, 227.0)]


@pytest.mark.parametrize(("gpus", "alpha", "bus"), MEASURED)
def test_all_reduces_in_a_node_are_as_measured(gpus: int, alpha: float, bus: float) -> None:
    fabric = Fabric.of(ACCELERATORS["A100-SXM4-80GB"])
    for size in (128 * 2**20, 2**30):
        measured = alpha * 1e-6 + 2 * (gpus - 1) / gpus * size / (bus * 1e9)
        assert all_reduce(size, Span((gpus, gpus)), fabric) == pytest.approx(measured, rel=0.25)


def test_a_large_ring_moves_twice_its_bytes() -> None:
    flat = Fabric((FabricLevel("network", 1 << 30, 50e9, 0.0),))
    for ranks in (2, 8, 64):
        expected = 2 * (ranks - 1) / ranks * 1e12 / (50e9 * LINK_EFFICIENCY)
        assert all_reduce(1e12, Span((ranks,)), flat) == pytest.approx(expected, rel=0.01)


def test_ranks_that_share_a_node_share_its_cards() -> None:
    spread, packed = Span((1, 16)), Span((8, 16))
    assert all_gather(GIGABYTE, spread, NODES) > 7 * all_gather(GIGABYTE, packed, NODES)


def test_small_all_reduces_over_many_nodes_take_a_tree() -> None:
    span = Span((1, 512))
    ring = 2 * ring_latency(span, NODES)
    assert tree_latency(span, NODES) <= all_reduce(8, span, NODES) < ring / 10


def test_in_network_reduction_halves_what_a_rank_sends() -> None:
    plain = Fabric((FabricLevel("nvlink", 8, 450e9), FabricLevel("network", 1 << 30, 50e9)))
    sharp = Fabric(
        (FabricLevel("nvlink", 8, 450e9, in_network=True), FabricLevel("network", 1 << 30, 50e9, in_network=True))
    )
    span = Span((1, 64))
    assert all_reduce(GIGABYTE, span, sharp) < 0.6 * all_reduce(GIGABYTE, span, plain)


def test_a_slow_spine_is_the_bottleneck() -> None:
    wide = Fabric(
        (FabricLevel("nvlink", 8, 450e9), FabricLevel("leaf", 256, 50e9), FabricLevel("spine", 1 << 30, 50e9))
    )
    narrow = Fabric(
        (FabricLevel("nvlink", 8, 450e9), FabricLevel("leaf", 256, 50e9), FabricLevel("spine", 1 << 30, 10e9))
    )
    inside, across = Span((8, 256, 256)), Span((8, 256, 512))
    assert all_reduce(GIGABYTE, inside, narrow) == all_reduce(GIGABYTE, inside, wide)
    assert all_reduce(GIGABYTE, across, narrow) > 3 * all_reduce(GIGABYTE, across, wide)


def test_all_to_all_is_bound_by_what_leaves_a_domain() -> None:
    inside, across = Span((8, 8)), Span((8, 64))
    assert all_to_all(GIGABYTE, across, NODES) > 5 * all_to_all(GIGABYTE, inside, NODES)
    leaving = GIGABYTE * (64 - 8) / 64 / (50e9 * NETWORK_EFFICIENCY)
    assert all_to_all(GIGABYTE, across, NODES) == pytest.approx(leaving, rel=0.02)


def test_sends_take_latency_and_bytes() -> None:
    assert send(GIGABYTE, 1, NODES) == pytest.approx(INTER_LATENCY + 1 / (50 * NETWORK_EFFICIENCY))
    assert send(0, 1, NODES) == 0.0


spans = st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 32)).map(lambda s: Span((s[0], s[0] * s[1])))


@given(spans, st.floats(1.0, 1e10), st.floats(1.01, 4.0))
def test_more_bytes_never_take_less_time(span: Span, size: float, factor: float) -> None:
    for collective in (all_gather, reduce_scatter, all_reduce, all_to_all):
        assert 0.0 <= collective(size, span, NODES) <= collective(size * factor, span, NODES)


@given(spans)
def test_one_rank_talks_to_nobody(span: Span) -> None:
    alone = Span((1, 1))
    assert all_reduce(GIGABYTE, alone, NODES) == all_gather(GIGABYTE, alone, NODES) == 0.0
    assert all_to_all(GIGABYTE, alone, NODES) == 0.0
    if span.size > 1:
        assert all_reduce(GIGABYTE, span, NODES) > BASE_LATENCY


def test_groups_follow_the_order_of_ranks() -> None:
    strategy = Strategy(tensor=4, pipeline=4, data=8, context=2)
    ours = group_spans(strategy, NODES, RankOrder.PIPELINE_INNER)
    theirs = group_spans(strategy, NODES, RankOrder.DATA_INNER)
    assert ours.tensor == theirs.tensor == Span((4, 4))
    assert ours.context == Span((2, 2))
    # Meshwright: stages 8 ranks apart, one a node. Megatron: replicas 8 apart, stages 64 apart.
    assert ours.shard_ranks == Span((2, 16))
    assert theirs.shard_ranks == Span((2, 16))
    assert ours.pipeline_level == theirs.pipeline_level == 1
    near = group_spans(Strategy(tensor=2, pipeline=4, data=8), NODES, RankOrder.PIPELINE_INNER)
    far = group_spans(Strategy(tensor=2, pipeline=4, data=8), NODES, RankOrder.DATA_INNER)
    assert (near.pipeline_level, far.pipeline_level) == (0, 1)
    assert (near.shard_ranks, far.shard_ranks) == (Span((1, 8)), Span((4, 8)))


def test_experts_fill_context_before_data() -> None:
    groups = group_spans(Strategy(tensor=1, context=2, data=8, expert=8), NODES, RankOrder.DATA_INNER)
    assert groups.expert == Span((8, 8))
    assert groups.expert_shard_ranks == Span((1, 2))


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA-H100-80GB-HBM3", "H100-SXM5-80GB"),
        ("NVIDIA-H100-PCIe", "H100-PCIE"),
        ("NVIDIA-A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA-H200", "H200-SXM5-141GB"),
        ("NVIDIA H200 NVL", "H200-NVL"),
        ("NVIDIA-GB200", "GB200"),
        ("NVIDIA-B200", "B200"),
        ("GH-96", "GH200-96GB"),
        ("Tesla-V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("H100 96GB HBM2e (2.4 TB/s, 500 W)", "H100-SXM5-96GB-HBM2E"),
        ("NVIDIA-L40S", "L40S"),
    ],
)
def test_products_are_found_by_their_words(product: str, name: str) -> None:
    found = accelerator(product)
    assert found is not None
    assert found.name == name


def test_an_unknown_product_is_unknown() -> None:
    assert accelerator("Radeon") is None
    assert accelerator("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb") is None
    assert accelerator("NVIDIA H100 80GB HBM3 MIG 3g.40gb") is None


@pytest.mark.parametrize(
    "levels", [(), (FabricLevel("leaf", 64, 1e9), FabricLevel("nvlink", 8, 1e9)), (FabricLevel("x", 0, 1e9),)]
)
def test_a_fabric_is_ordered(levels: tuple[FabricLevel, ...]) -> None:
    with pytest.raises(ValueError, match="narrow to wide"):
        Fabric(levels)


def test_gpus_without_nvlink_share_their_host() -> None:
    fabric = Fabric.of(ACCELERATORS["L40S"])
    assert [level.name for level in fabric.levels] == ["host", "network"]
    assert Fabric.of(ACCELERATORS["GB200"]).domain == 72


def test_switches_of_a_level_that_a_group_does_not_cross_do_not_matter() -> None:
    """SHARP between nodes sums for one rank of each node, also where NVLink's switches do not sum."""
    network = FabricLevel("network", 1 << 30, 12.5e9, in_network=True)
    with_nvls = Fabric((FabricLevel("nvlink", 8, 450e9, in_network=True), network))
    without = with_nvls.without_nvlink_sums()
    between, everywhere = Span((1, 64)), Span((8, 64))
    assert all_reduce(GIGABYTE, between, without) == all_reduce(GIGABYTE, between, with_nvls)
    assert all_reduce(GIGABYTE, Span((8, 8)), without) > 1.3 * all_reduce(GIGABYTE, Span((8, 8)), with_nvls)
    plain = Fabric((FabricLevel("nvlink", 8, 450e9), FabricLevel("network", 1 << 30, 12.5e9)))
    assert all_reduce(GIGABYTE, everywhere, without) < all_reduce(GIGABYTE, everywhere, plain)
