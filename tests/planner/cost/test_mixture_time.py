"""The parts of a step that only mixtures of experts have."""

from __future__ import annotations

from dataclasses import replace
from math import comb

import pytest

from meshwright.api.parallelism import ContextMethod
from meshwright.api.parallelism import PipelineSchedule as Schedule
from meshwright.api.precision import Precision
from meshwright.api.training import ActivationCheckpointing
from meshwright.models.presets import PRESETS, published
from meshwright.planner.cost.accelerators import ACCELERATORS
from meshwright.planner.cost.comm_groups import group_spans
from meshwright.planner.cost.comm_time import (
    NO_COMM,
    context_comm_time,
    expert_comm_time,
    expert_gather_time,
    key_value_width,
    nodes_per_token,
    tensor_comm_time,
)
from meshwright.planner.cost.constants import SYNCHRONIZE
from meshwright.planner.cost.estimate import estimate, machine_for
from meshwright.planner.cost.fabric import BASE_LATENCY, INTER_LATENCY, INTRA_LATENCY, Fabric
from meshwright.planner.cost.frameworks import FRAMEWORKS
from meshwright.planner.cost.roofline import LayerShape, LayerTime, layer_time, matmuls_of, quantized_bytes, tile_rows
from meshwright.planner.cost.stage_time import Bottleneck, MicroBatchTime, bottleneck_of, forward_and_backward_parts
from meshwright.planner.cost.stages import stages_of
from meshwright.planner.cost.step_time import StepTime
from meshwright.planner.cost.strategy import LayerStrategy, Strategy, Workload
from meshwright.schedules.registry import kind_of
from meshwright.schedules.schedule import PipelineShape

H100S = machine_for(ACCELERATORS["H100-SXM5-80GB"])
V3 = published("deepseek-v3")
TOKENS, HIDDEN, PER_TOKEN = 4096, 7168, 8
SPREAD = Strategy(pipeline=16, data=128, expert=64, micro_batches=120, zero_stage=1)
"""Experts on 8 nodes. With stages of a replica on consecutive ranks, each has one expert rank of a group."""


def exchange(strategy: Strategy, runtime: str = "meshwright") -> float:
    framework = FRAMEWORKS[runtime]
    span = group_spans(strategy, H100S.fabric, framework.order).expert
    time = expert_comm_time(TOKENS, V3, LayerStrategy.of(strategy), span, H100S.fabric, framework)
    return time.forward / (1.0 - framework.overlap_experts)


def test_every_expert_of_a_token_gets_a_row() -> None:
    # 8 rows of 7,168 bf16 numbers for each token, there and back, of which 63/64 leave the rank: 50 GB/s, 96% of it.
    sent = 2 * 2 * TOKENS * PER_TOKEN * HIDDEN * 63 / 64
    assert exchange(SPREAD) == pytest.approx(sent / (50e9 * 0.96), rel=0.01)


def test_a_library_that_forwards_inside_nodes_sends_one_row_to_each() -> None:
    # Ranks of an expert group fill nodes: 7 of 8 nodes are others, and 3.6 of at most 4 have one of the 8 experts of a
    # token, which are different ones of the 128 in its 4 groups.
    nodes = 4 * (1 - comb(96, 8) / comb(128, 8))
    assert V3.mixture is not None
    assert nodes_per_token(V3.mixture, 8) == pytest.approx(nodes)
    sent = 2 * 2 * TOKENS * nodes * HIDDEN * 7 / 8
    assert exchange(SPREAD, "megatron-core-deepep") == pytest.approx(sent / (50e9 * 0.96), rel=0.02)
    latency = 2 * (BASE_LATENCY + 3 * INTER_LATENCY + 3 * INTRA_LATENCY)
    copies = exchange(SPREAD, "megatron-core") - latency
    assert copies / (exchange(SPREAD, "megatron-core-deepep") - latency) == pytest.approx(PER_TOKEN / nodes)


def test_rows_travel_in_the_format_of_the_layer() -> None:
    # The runtime quantizes rows at the experts, after they arrived; others send fp8.
    fp8 = replace(SPREAD, precision=Precision.BF16, fp8=True)
    assert exchange(fp8) == pytest.approx(exchange(SPREAD))
    assert exchange(fp8, "megatron-core") == pytest.approx(0.75 * exchange(fp8, "meshwright") * 56 / 63, rel=0.02)


def test_overlapped_passes_hide_the_exchange() -> None:
    # Every rank sends its rows while the other micro-batch of the pair computes, and pairs are most of a step.
    work = Workload(V3, 4096, 15360)
    apart, pairs = (
        estimate(work, replace(SPREAD, schedule=schedule), H100S).time.expert
        for schedule in (Schedule.ZB_V, Schedule.DUAL_PIPE_V)
    )
    assert pairs < 0.7 * apart
    # An exchange that takes longer than the other pass's kernels is not hidden entirely.
    slow = machine_for(ACCELERATORS["H100-SXM5-80GB"], fabric=Fabric.of(ACCELERATORS["H100-SXM5-80GB"], nic=5e9))
    apart, pairs = (
        estimate(work, replace(SPREAD, schedule=schedule), slow).time.expert
        for schedule in (Schedule.ZB_V, Schedule.DUAL_PIPE_V)
    )
    assert 0.85 * apart < pairs < apart


def test_passes_that_fill_and_drain_hide_nothing() -> None:
    work = Workload(V3, 4096, 15360)
    spread = replace(SPREAD, schedule=Schedule.DUAL_PIPE_V)
    few, many = (
        estimate(work, replace(spread, data=data, micro_batches=15360 // data), H100S).time for data in (64 * 6, 64)
    )
    assert few.expert / few.compute > 1.3 * many.expert / many.compute


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 20), (8, 64), (16, 120)])
@pytest.mark.parametrize("schedule", [Schedule.DUAL_PIPE, Schedule.DUAL_PIPE_V])
def test_pairs_are_those_of_the_schedule(schedule: Schedule, ranks: int, micro_batches: int) -> None:
    kind, shape = kind_of(schedule), PipelineShape(ranks, micro_batches)
    order = kind.generate(shape)
    passes = micro_batches * (2 if kind.v_shaped else 1)
    fewest = min(sum(len(slot) == 2 for slot in slots) for slots in order.ranks)
    assert kind.paired(shape) == pytest.approx(fewest / passes)
    assert kind.paired(PipelineShape(ranks, 1)) == 0.0


def layer(strategy: Strategy) -> StepTime:
    return estimate(Workload(V3, 4096, strategy.data * strategy.micro_batches), strategy, H100S).time


SPLIT = Strategy(tensor=2, expert=8, data=8, micro_batches=8, zero_stage=1)
"""Experts split by number over data, and by width over the tensor group."""


def test_a_tensor_group_gathers_the_rows_of_its_experts() -> None:
    # Rows of both ranks, 8 for each token: before the experts, and their outputs after them; in both passes.
    span = group_spans(SPLIT, H100S.fabric, H100S.runtime.order).tensor
    time = expert_gather_time(TOKENS, V3, LayerStrategy.of(SPLIT), span, H100S.fabric)
    gathered = TOKENS * PER_TOKEN * HIDDEN * 2 / 2
    assert time.forward == time.backward == pytest.approx(2 * gathered / (450e9 * 0.8), rel=0.02)
    whole = LayerStrategy.of(replace(SPLIT, expert_tensor=False))
    assert expert_gather_time(TOKENS, V3, whole, span, H100S.fabric) == NO_COMM
    assert layer(replace(SPLIT, expert_tensor=False)).tensor < 0.6 * layer(SPLIT).tensor


def test_own_positions_need_no_gather_for_a_mixture_without_shared_experts() -> None:
    mixtral = published("mixtral-8x7b")
    span = group_spans(SPLIT, H100S.fabric, H100S.runtime.order).tensor
    dense, routed = (
        tensor_comm_time(TOKENS, mixtral, LayerStrategy.of(SPLIT), mixture, span, H100S.fabric).forward
        for mixture in (False, True)
    )
    assert routed == pytest.approx(dense / 2)


@pytest.mark.parametrize(("part", "again"), [("expert", 1.5), ("tensor", 1.45)])
def test_selective_recomputation_repeats_the_exchanges(part: str, again: float) -> None:
    # It stores outputs of products and attention. The rows that arrive at experts are inputs: they are sent again.
    stored, selective = (
        getattr(layer(replace(SPLIT, checkpointing=how)), part)
        for how in (ActivationCheckpointing.NONE, ActivationCheckpointing.SELECTIVE)
    )
    assert selective == pytest.approx(again * stored, rel=0.04)


def test_weight_gradients_wait_for_no_exchange() -> None:
    one = MicroBatchTime(1.0, 1.0, 1.0, 0.0, 0.2, 0.0, 0.4, 0.3)
    assert forward_and_backward_parts(one) == pytest.approx((1.4, 1.4, 1.1))


def test_context_parallelism_moves_the_expanded_keys_and_values() -> None:
    # 128 heads with keys of 128 + 64 and values of 128 numbers, not the latent's 512 + 64.
    assert key_value_width(V3) == 128 * (192 + 128)
    for method in (ContextMethod.ALL_GATHER, ContextMethod.RING_ZIG_ZAG):
        shared = LayerStrategy.of(Strategy(context=2, context_method=method))
        span = group_spans(Strategy(context=2), H100S.fabric, H100S.runtime.order).context
        time = context_comm_time(TOKENS, V3, shared, span, H100S.fabric, 0.0)
        moved = TOKENS * key_value_width(V3) * 2
        overhead = 0.0 if method is ContextMethod.ALL_GATHER else SYNCHRONIZE
        assert time.forward - overhead == pytest.approx(moved / (450e9 * 0.8), rel=0.06)


def layer_seconds(tokens: int, expert: int, runtime: str = "meshwright") -> LayerTime:
    shape = LayerShape(V3, True, tokens, 4096, 1, 1, False, expert, True, Precision.BF16)
    return layer_time(shape, H100S.gpu, FRAMEWORKS[runtime])


@pytest.mark.parametrize("expert", [1, 4])
def test_few_rows_for_each_expert_wait_for_memory(expert: int) -> None:
    # Next to each product's read of the weights, 3 x 7,168 x 2,048 of each expert, a micro-batch casts them from fp32,
    # and adds their gradient in bf16 to one in fp32.
    rate, weights = 3.35e12 * 0.8, (256 / expert - 1) * 3 * 7168 * 2048
    more, fewer = layer_seconds(1, expert), layer_seconds(1, 256)
    assert more.forward - fewer.forward == pytest.approx(weights * (2 + 6) / rate, rel=0.02)
    assert more.backward_input - fewer.backward_input == pytest.approx(weights * 2 / rate, rel=0.06)
    assert more.backward_weight - fewer.backward_weight == pytest.approx(weights * (2 + 10) / rate, rel=0.02)


def test_fp8_experts_are_quantized_for_every_micro_batch() -> None:
    # Without copies of the weights in fp8: read twice and written forward, read and written backward.
    rate, weights = 3.35e12 * 0.8, 63 * 3 * 7168 * 2048
    shape = LayerShape(V3, True, 1, 4096, 1, 1, False, 4, True, Precision.BF16, fp8=True)
    more, fewer = (layer_time(replace(shape, expert=ranks), H100S.gpu, FRAMEWORKS["meshwright"]) for ranks in (4, 256))
    assert more.forward - fewer.forward == pytest.approx(weights * (1 + 6 + 5) / rate, rel=0.02)
    assert more.backward_input - fewer.backward_input == pytest.approx(weights * (1 + 3) / rate, rel=0.06)


def test_the_operands_of_fp8_products_are_quantized() -> None:
    # Inputs are read twice and written forward; gradients too, and both are copied to the other layout backward.
    model = published("llama-3.1-8b")
    shape = LayerShape(model, False, 8192, 8192, 1, 1, False, 1, True, Precision.BF16, fp8=True)
    hidden, inner, keys = model.hidden_size, model.intermediate_size, 2 * model.kv_heads * model.key_size
    inputs, outputs = 3 * hidden + inner, hidden + keys + 2 * hidden + 2 * inner
    weights = hidden * (hidden + keys) + hidden * hidden + 3 * hidden * inner
    forward, backward = quantized_bytes(shape, FRAMEWORKS["torchtitan"])
    assert forward == pytest.approx(5 * (8192 * inputs + weights))
    assert backward == pytest.approx(8192 * (7 * outputs + 2 * inputs) + 3 * weights)
    assert quantized_bytes(shape, FRAMEWORKS["megatron-core"])[0] == pytest.approx(5 * 8192 * inputs)


def test_a_larger_micro_batch_moves_weights_less_often() -> None:
    small, large = (layer_seconds(tokens, 4) for tokens in (4096, 16384))
    assert small.backward_weight / 4096 > 1.5 * large.backward_weight / 16384


def test_the_last_tile_of_each_expert_is_half_full() -> None:
    # 4,096 tokens with 8 of 256 experts: 128 rows for each, in 1 or 2 tiles of 128; 1.5 on average.
    assert [tile_rows(rows) for rows in (0, 64, 128, 4096)] == [0, 128, 192, 4160]
    assert tile_rows(8) == pytest.approx(128, rel=0.001)
    shape = LayerShape(V3, True, 4096, 4096, 1, 1, False, 1, True, Precision.BF16)
    grouped = [one for one in matmuls_of(shape) if one[3] > 1]
    assert [(rows, computed) for rows, _, _, _, computed in grouped] == [(128, 192), (128, 192)]
    # Spread over 64 ranks, each expert has the rows of all of them.
    spread = replace(shape, expert=64)
    assert {one[4] / one[0] for one in matmuls_of(spread) if one[3] > 1} == {8256 / 8192}
    assert {one[4] / one[0] for one in matmuls_of(replace(shape, mixture=False))} == {1.0}


def test_a_rank_of_both_directions_has_the_mean_of_its_stages() -> None:
    # The last of 8 ranks has the output of a large vocabulary. DualPipe's ranks have a stage from each end, each for
    # half of the micro-batches.
    model = PRESETS["llama-3.1-70b"].model_copy(update={"vocab_size": 512_000})
    plain = Strategy(pipeline=8, micro_batches=64, schedule=Schedule.ZB_H1)

    def slowest(strategy: Strategy) -> Bottleneck:
        groups = group_spans(strategy, H100S.fabric, H100S.runtime.order)
        return bottleneck_of(Workload(model, 4096, 64), strategy, H100S, groups, stages_of(model, strategy))

    one, both = slowest(plain), slowest(replace(plain, schedule=Schedule.DUAL_PIPE))
    assert one.slowest.output
    assert both.longest < 0.9 * one.longest
    assert both.mean == pytest.approx(one.mean)
    assert both.longest == pytest.approx(both.worst.total)


def test_multi_token_prediction_has_a_layer_of_its_own() -> None:
    predicting = V3.model_copy(update={"prediction_layers": 1})
    strategy = Strategy(expert=8, data=8, micro_batches=8, zero_stage=1)
    work = [Workload(model, 4096, 64) for model in (predicting, V3, V3.model_copy(update={"layers": 62}))]
    one, none, more = (estimate(each, strategy, H100S).time for each in work)
    assert one.expert == pytest.approx(more.expert)
    assert one.compute > more.compute > none.compute  # It also has logits.
