"""Traffic of a step by dimension and level, against counts by hand and against rings that are walked hop by hop."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from meshwright.api.parallelism import ContextMethod
from meshwright.models.presets import PRESETS
from meshwright.planner.cost.accelerators import accelerator
from meshwright.planner.cost.collectives import all_gather
from meshwright.planner.cost.comm_groups import group_spans
from meshwright.planner.cost.estimate import machine_for
from meshwright.planner.cost.fabric import Span
from meshwright.planner.cost.frameworks import FRAMEWORKS
from meshwright.planner.cost.machine import Machine
from meshwright.planner.cost.stages import stages_of
from meshwright.planner.cost.strategy import Strategy, Workload
from meshwright.planner.cost.traffic import peer_shares, ring_shares, step_traffic
from meshwright.planner.cost.update_time import gradient_sync_seconds

H100 = accelerator("NVIDIA-H100-80GB-HBM3")
assert H100 is not None
MACHINE = machine_for(H100)
MODEL = PRESETS["llama-3-8b"]
WORK = Workload(MODEL, 8192, 64)


def traffic(strategy: Strategy, machine: Machine = MACHINE) -> dict[str, tuple[float, ...]]:
    groups = group_spans(strategy, machine.fabric, machine.runtime.order)
    return {one.dimension: one.by_level for one in step_traffic(WORK, strategy, machine, groups)}


def walked(members: tuple[int, ...]) -> list[float]:
    """The part of a ring's hops on each level, counted hop by hop."""
    size, counts = members[-1], Counter[int]()
    for rank in range(size):
        other = (rank + 1) % size
        counts[next(i for i, inside in enumerate(members) if rank // inside == other // inside)] += 1
    return [counts[i] / size for i in range(len(members))]


@pytest.mark.parametrize("members", [(8, 8), (8, 32), (1, 16), (4, 8, 32), (2, 2, 64), (1, 1, 4), (8, 16, 16)])
def test_a_ring_leaves_each_location_once(members):
    assert ring_shares(Span(members)) == pytest.approx(walked(members))


@pytest.mark.parametrize("members", [(8, 8), (8, 32), (1, 16), (4, 8, 32)])
def test_equal_sends_to_all_others_are_counted_by_their_level(members):
    size = members[-1]
    counts = Counter(next(i for i, inside in enumerate(members) if other < inside) for other in range(1, size))
    assert peer_shares(Span(members)) == pytest.approx([counts[i] / (size - 1) for i in range(len(members))])


def test_one_rank_sends_nothing():
    assert traffic(Strategy(micro_batches=64)) == {}


@pytest.mark.parametrize(("keeps_gathered", "collectives"), [(True, 8), (False, 10)])
def test_tensor_parallelism_with_sequence_parallelism(keeps_gathered, collectives):
    machine = replace(MACHINE, runtime=replace(MACHINE.runtime, keeps_gathered=keeps_gathered))
    strategy = Strategy(tensor=8, data=1, micro_batches=64)
    # Per layer and pass two gathers and two scatters of 16-bit elements, each of 7/8 of the sequence's activations. A
    # runtime that does not keep what it gathered gathers both inputs once more in the backward pass.
    by_hand = 64 * 32 * collectives * (7 / 8) * 8192 * 4096 * 2
    assert traffic(strategy, machine)["tensor"] == pytest.approx((by_hand, 0.0))


def test_tensor_parallelism_without_sequence_parallelism():
    strategy = Strategy(tensor=8, data=1, micro_batches=64, sequence_parallel=False)
    by_hand = 64 * 32 * 4 * 2 * (7 / 8) * 8192 * 4096 * 2  # two all-reduces in each pass, each twice 7/8
    assert traffic(strategy)["tensor"][0] == pytest.approx(by_hand)


def test_stages_send_activations_forward_and_gradients_back():
    strategy = Strategy(tensor=8, pipeline=4, data=1, micro_batches=64)
    assert traffic(strategy)["pipeline"] == pytest.approx((0.0, 2 * 64 * 8192 * 4096 * 2 / 8))


def test_ring_attention_sends_keys_and_values_once_forward_and_with_gradients_backward():
    strategy = Strategy(context=4, data=1, micro_batches=64, context_method=ContextMethod.RING_ZIG_ZAG)
    keys_and_values = 8192 // 4 * 2 * 8 * 128 * 2
    assert sum(traffic(strategy)["context"]) == pytest.approx(64 * 32 * 3 * 3 * keys_and_values)


def test_ulysses_exchanges_heads_twice_in_each_pass():
    strategy = Strategy(context=4, data=1, micro_batches=64, context_method=ContextMethod.ULYSSES)
    tokens = 8192 // 4
    rows = tokens * (2 * 32 * 128 + 2 * 8 * 128) * 2  # queries and outputs, keys and values
    assert sum(traffic(strategy)["context"]) == pytest.approx(64 * 32 * 2 * (3 / 4) * rows)


def test_replicas_reduce_gradients_over_the_network():
    strategy = Strategy(tensor=8, data=8, micro_batches=8)
    inside, between = traffic(strategy)["data"]
    parameters = MODEL.parameters / 8
    assert inside == 0.0
    assert between == pytest.approx(2 * (7 / 8) * parameters * MACHINE.runtime.reduced, rel=0.01)


def test_tokens_travel_to_their_experts_and_back():
    work = Workload(PRESETS["mixtral-8x7b"], 4096, 64)
    strategy = Strategy(data=8, expert=8, micro_batches=8)
    groups = group_spans(strategy, MACHINE.fabric, MACHINE.runtime.order)
    found = {one.dimension: one.by_level for one in step_traffic(work, strategy, MACHINE, groups)}
    one_way = 4096 * 2 * 4096 * 2 * (7 / 8)  # two experts for each token, in 16 bits
    assert found["expert"][0] == pytest.approx(8 * 32 * 4 * one_way)


@pytest.mark.parametrize(("stage", "gathers"), [(2, 1), (3, 2 * 8)])
def test_fsdp_gathers_in_fp8_only_if_asked(stage, gathers):
    half = Strategy(data=8, micro_batches=8, zero_stage=stage)
    eight = replace(half, fp8=True)
    asked = replace(eight, settings=replace(eight.settings, gathers_fp8=True))
    (plain,), (products,), (gathered,) = (traffic(one).values() for one in (half, eight, asked))
    assert products == plain
    weights = MODEL.parameters - 2 * MODEL.vocab_size * MODEL.hidden_size
    assert sum(plain) - sum(gathered) == pytest.approx(gathers * weights * 7 / 8)
    # Faster by these bytes, but for one reduction of the largest numbers of weights, which is all latency.
    groups = group_spans(half, MACHINE.fabric, MACHINE.runtime.order)
    before, after = (
        gradient_sync_seconds(WORK, one, MACHINE, groups, stages_of(MODEL, one), (0.0, 0.0)) for one in (eight, asked)
    )
    faster = gathers * all_gather(weights, groups.shard_ranks, MACHINE.fabric)
    assert faster - 1e-3 < (before - after) / MACHINE.constants.communication < faster


def test_other_runtimes_gather_in_the_format_of_products():
    half = Strategy(data=8, micro_batches=8, zero_stage=3)
    eight = replace(half, fp8=True)
    other = replace(MACHINE, runtime=FRAMEWORKS["torchtitan"])
    assert sum(*traffic(eight, other).values()) < sum(*traffic(half, other).values())


def test_a_scattered_ring_moves_its_bytes_to_the_network():
    strategy = Strategy(data=8, micro_batches=8)
    near = group_spans(strategy, MACHINE.fabric, MACHINE.runtime.order)
    far = replace(near, shard_ranks=Span((1, 8)))
    for groups, expected in ((near, (1.0, 0.0)), (far, (0.0, 1.0))):
        (data,) = step_traffic(WORK, strategy, MACHINE, groups)
        assert [part / data.total for part in data.by_level] == pytest.approx(list(expected))
