"""Step time: what it is made of, what every choice does to it, and published measurements."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.api.parallelism import ContextMethod
from meshwright.api.parallelism import PipelineSchedule as Schedule
from meshwright.api.precision import Precision
from meshwright.api.training import ActivationCheckpointing, OptimizerOffload
from meshwright.models.architecture import Architecture
from meshwright.models.presets import PRESETS, published
from meshwright.planner.cost.accelerators import ACCELERATORS, accelerator
from meshwright.planner.cost.comm_groups import group_spans
from meshwright.planner.cost.constants import (
    DEFAULT,
    FITTED,
    HOST_PER_LAYER,
    JITTER_RANKS,
    PER_STEP,
    SYNCHRONIZE,
    Constants,
    calibrate,
    constants_for,
    jitter,
)
from meshwright.planner.cost.estimate import estimate, fits, machine_for, memory_of
from meshwright.planner.cost.fabric import Fabric
from meshwright.planner.cost.frameworks import FRAMEWORKS
from meshwright.planner.cost.machine import Machine
from meshwright.planner.cost.roofline import LayerShape, flash_part, layer_time
from meshwright.planner.cost.stage_time import exposed_host, weight_pass_bytes
from meshwright.planner.cost.strategy import MemoryOptions, Strategy, Workload
from meshwright.planner.cost.timeline import simulate_pipeline
from meshwright.planner.cost.update_time import HOST_PER_COPY

A100, H100 = ACCELERATORS["A100-SXM4-80GB"], ACCELERATORS["H100-SXM5-80GB"]
LLAMA = PRESETS["llama-3.1-70b"]
H100S = machine_for(H100)


def seconds(strategy: Strategy, work: Workload | None = None, machine: Machine = H100S) -> float:
    return estimate(work or Workload(LLAMA, 8192, 64), strategy, machine).seconds


# Korthikanti et al. (arXiv 2205.05198, table 4): milliseconds of one layer of the 22B model, TP 8, micro-batch 4.
LAYERS = [
    (False, ActivationCheckpointing.NONE, 7.7, 11.9),
    (True, ActivationCheckpointing.NONE, 7.2, 11.8),
    (False, ActivationCheckpointing.FULL, 7.7, 19.5),
    (False, ActivationCheckpointing.SELECTIVE, 7.7, 13.2),
]


@pytest.mark.parametrize(("parallel", "recompute", "forward", "backward"), LAYERS)
def test_layers_take_what_was_measured(
    parallel: bool, recompute: ActivationCheckpointing, forward: float, backward: float
) -> None:
    model = Architecture(
        layers=1,
        hidden_size=6144,
        intermediate_size=24576,
        heads=64,
        kv_heads=64,
        vocab_size=51200,
        gated=False,
        biases=True,
        tie_embeddings=True,
    )
    shape = LayerShape(model, False, 8192, 2048, 1, 8, parallel, 1, False, Precision.FP16)
    time = layer_time(shape, A100, FRAMEWORKS["megatron-lm"])
    # Two all-reduces of 100 MB forward and two backward, at 227 GB/s of bus bandwidth.
    communication = 2 * 2 * 7 / 8 * 8192 * 6144 * 2 / 227e9
    ours = (time.forward + communication) * 1e3
    back = (
        time.backward_input
        + time.backward_weight
        + time.recomputed(recompute, FRAMEWORKS["megatron-lm"])
        + communication
    )
    if recompute is ActivationCheckpointing.FULL:
        back += communication / 2
    assert ours == pytest.approx(forward, rel=0.15)
    assert back * 1e3 == pytest.approx(backward, rel=0.20)


# Megatron-LM's weak scaling (arXiv 2104.04473, table 1): seconds that follow from its TFLOP/s.
WEAK = [
    ("megatron-3.6b", 2, 1, 32, 16, 512, 3.697),
    ("megatron-18.4b", 8, 1, 32, 8, 1024, 9.399),
    ("megatron-39.1b", 8, 2, 32, 4, 1536, 14.453),
    ("megatron-1008b", 8, 64, 6, 1, 3072, 102.63),
]


@pytest.mark.parametrize(("name", "tensor", "pipeline", "data", "micro", "batch", "measured"), WEAK)
def test_weak_scaling_on_a100(
    name: str, tensor: int, pipeline: int, data: int, micro: int, batch: int, measured: float
) -> None:
    work = Workload(published(name), 2048, batch, causal=False)
    strategy = Strategy(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        micro_batch_size=micro,
        micro_batches=batch // (data * micro),
        sequence_parallel=False,
        checkpointing=ActivationCheckpointing.FULL,
        precision=Precision.FP16,
    )
    machine = machine_for(A100, FRAMEWORKS["megatron-lm"])
    assert estimate(work, strategy, machine).seconds == pytest.approx(measured, rel=0.08)


# Megatron-LM on 175B, strong scaling at two batch sizes (arXiv 2402.15627, table 2): GPUs, batch, seconds. No constant
# was fitted on these runs. Their micro-batch size is not printed; 1 is what six virtual stages are used with.
STRONG = [(256, 768, 40.0), (512, 768, 21.2), (1024, 768, 11.9), (3072, 6144, 29.02), (6144, 6144, 14.78)]


@pytest.mark.parametrize(("gpus", "batch", "measured"), [*STRONG, (12288, 6144, 8.57)])
def test_strong_scaling_that_was_never_fitted(gpus: int, batch: int, measured: float) -> None:
    data = gpus // 64
    strategy = Strategy(
        tensor=8,
        pipeline=8,
        data=data,
        schedule=Schedule.INTERLEAVED,
        virtual_stages=6,
        micro_batches=batch // data,
        zero_stage=1,
        checkpointing=ActivationCheckpointing.SELECTIVE,
    )
    work = Workload(published("gpt3-175b").model_copy(update={"vocab_size": 64_000}), 2048, batch, causal=False)
    machine = machine_for(A100, FRAMEWORKS["megatron-lm"])
    assert estimate(work, strategy, machine).seconds == pytest.approx(measured, rel=0.12)


def test_a_mixture_that_was_never_fitted() -> None:
    # DeepSeek-V3 on 2,048 H800 (arXiv 2505.09343, table 4): 19.926 s; PP 16, EP 64, ZeRO-1, DualPipe, fp8.
    strategy = Strategy(
        pipeline=16,
        data=128,
        expert=64,
        micro_batches=120,
        zero_stage=1,
        schedule=Schedule.DUAL_PIPE,
        fp8=True,
        layer_split=(4,) * 13 + (3,) * 3,
    )
    # It sends a token once to each node, of at most four (arXiv 2412.19437, section 3.2.2).
    machine = machine_for(ACCELERATORS["H800-SXM5-80GB"], FRAMEWORKS["megatron-core-deepep"])
    model = published("deepseek-v3").model_copy(update={"prediction_layers": 1})
    found = estimate(Workload(model, 4096, 15360), strategy, machine)
    # The estimate leaves out what makes experts' loads differ: it is below what was measured.
    assert 0.7 <= found.seconds / 19.926 <= 1.0


def test_a_step_is_the_sum_of_its_parts() -> None:
    time = estimate(Workload(LLAMA, 8192, 64), Strategy(tensor=8, pipeline=4, data=2, micro_batches=32), H100S).time
    assert time.total == pytest.approx(sum(getattr(time, part.name) for part in fields(time)))
    assert min(getattr(time, part.name) for part in fields(time)) >= 0.0


def test_efficiency_falls_with_narrow_products() -> None:
    def rate(tensor: int, tokens: int) -> float:
        shape = LayerShape(LLAMA, False, tokens, 8192, 1, tensor, True, 1, True, Precision.BF16)
        return tokens / (tensor * layer_time(shape, H100, FRAMEWORKS["meshwright"]).forward)

    wide = [rate(tensor, 8192) for tensor in (1, 2, 4, 8, 16)]
    assert wide == sorted(wide, reverse=True)
    long = [rate(1, tokens) for tokens in (128, 1024, 8192)]
    assert long == sorted(long)


def test_leaving_the_node_costs_tensor_parallelism_dearly() -> None:
    inside = estimate(Workload(LLAMA, 8192, 64), Strategy(tensor=8, data=8, micro_batches=8), H100S)
    outside = estimate(Workload(LLAMA, 8192, 64), Strategy(tensor=16, data=4, micro_batches=16), H100S)
    assert outside.time.tensor > 2 * inside.time.tensor
    assert outside.seconds > 1.25 * inside.seconds


def test_schedules_differ_by_their_bubble() -> None:
    base = Strategy(tensor=8, pipeline=8, micro_batches=64)
    bubbles = {
        schedule: estimate(
            Workload(LLAMA, 8192, 64), replace(base, schedule=schedule, virtual_stages=chunks), H100S
        ).bubble
        for schedule, chunks in (
            (Schedule.ONE_F_ONE_B, 1),
            (Schedule.INTERLEAVED, 5),
            (Schedule.ZB_H1, 1),
        )
    }
    assert bubbles[Schedule.INTERLEAVED] < bubbles[Schedule.ZB_H1] < bubbles[Schedule.ONE_F_ONE_B]
    assert bubbles[Schedule.ONE_F_ONE_B] == pytest.approx(7 / 71, abs=0.02)


def test_an_automatic_schedule_waits_less_with_more_room() -> None:
    base = Strategy(tensor=8, pipeline=8, micro_batches=64, schedule=Schedule.AUTOMATIC)
    waits = [
        estimate(Workload(LLAMA, 8192, 64), replace(base, settings=MemoryOptions(activation_limit=room)), H100S).bubble
        for room in (4, 6, 8, 10, 12)
    ]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > 2 * waits[2]
    plain = estimate(Workload(LLAMA, 8192, 64), replace(base, schedule=Schedule.ZB_H1), H100S).bubble
    assert plain == pytest.approx(waits[2])


@pytest.mark.parametrize(
    "schedule",
    [Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZB_H1, Schedule.INTERLEAVED],
)
@pytest.mark.parametrize("split", [None, (11, 10, 10, 10, 10, 10, 10, 9)])
def test_the_closed_form_agrees_with_the_simulated_pipeline(schedule: Schedule, split: tuple[int, ...] | None) -> None:
    chunks = 2 if schedule is Schedule.INTERLEAVED else 1
    strategy = Strategy(
        tensor=8, pipeline=8, micro_batches=64, schedule=schedule, virtual_stages=chunks, layer_split=split
    )
    work = Workload(LLAMA, 8192, 64)
    groups = group_spans(strategy, H100S.fabric, H100S.runtime.order)
    pipeline = simulate_pipeline(work, strategy, H100S, groups)
    time = estimate(work, strategy, H100S).time
    closed = time.total - time.data - time.optimizer - 15e-3 * H100S.constants.host
    assert closed == pytest.approx(pipeline.simulation.makespan, rel=0.08)
    assert pipeline.slowest == (7 if split is None else 0)


def test_a_better_split_evens_out_the_output_layer() -> None:
    model = LLAMA.model_copy(update={"vocab_size": 512_000, "name": "large vocabulary"})
    even = Strategy(tensor=8, pipeline=8, micro_batches=64)
    uneven = replace(even, layer_split=(11, 11, 11, 11, 11, 11, 10, 4))
    assert seconds(uneven, Workload(model, 8192, 64)) < seconds(even, Workload(model, 8192, 64))


@pytest.mark.parametrize("method", list(ContextMethod))
def test_context_parallelism_shares_a_long_sequence(method: ContextMethod) -> None:
    work = Workload(LLAMA, 131072, 8)
    one = seconds(Strategy(tensor=8, micro_batches=8), work)
    four = seconds(Strategy(tensor=8, context=4, context_method=method, micro_batches=8), work)
    assert one / 4 < four < one / 2


def test_recomputation_costs_its_forward_pass() -> None:
    times = [
        seconds(Strategy(tensor=8, data=8, micro_batches=8, checkpointing=how))
        for how in (ActivationCheckpointing.NONE, ActivationCheckpointing.SELECTIVE, ActivationCheckpointing.FULL)
    ]
    assert times[0] < times[1] < times[2] < 1.45 * times[0]


def test_some_recomputing_layers_cost_their_share() -> None:
    base = Strategy(tensor=8, data=8, micro_batches=8, checkpointing=ActivationCheckpointing.FULL)
    none, half, every = (seconds(replace(base, checkpoint_layers=n)) for n in (0, 40, 80))
    assert half - none == pytest.approx(every - half, rel=0.05)


def test_zero_3_pays_for_gathering() -> None:
    base = Strategy(data=64, micro_batch_size=1)
    two, three = (
        estimate(Workload(LLAMA, 2048, 64), replace(base, zero_stage=stage), H100S).time.data for stage in (2, 3)
    )
    assert three > two


def test_offloading_is_slower_than_keeping() -> None:
    base = Strategy(tensor=8, data=8, zero_stage=1, micro_batches=8)
    keep, host, disk = (
        seconds(replace(base, optimizer_offload=where))
        for where in (OptimizerOffload.NONE, OptimizerOffload.CPU, OptimizerOffload.FILE)
    )
    assert keep < host < disk


def test_experts_pay_more_outside_their_domain() -> None:
    model = published("deepseek-v3")
    work = Workload(model, 4096, 512)
    # Ranks of the expert group are 8 apart: in one domain of 72 GPUs, and each in its own of 8.
    base = Strategy(pipeline=8, data=64, expert=8, micro_batches=8, zero_stage=1)
    small = estimate(work, base, machine_for(H100)).time.expert
    large = estimate(work, base, machine_for(ACCELERATORS["GB200"])).time.expert
    assert small > 5 * large > 0


def test_the_slowest_gpu_sets_the_pace() -> None:
    strategy = Strategy(tensor=8, data=8, micro_batches=8)
    half = machine_for(H100, slowest=0.5)
    full = estimate(Workload(LLAMA, 8192, 64), strategy, H100S).time
    slow = estimate(Workload(LLAMA, 8192, 64), strategy, half).time
    assert slow.compute == pytest.approx(2 * full.compute)
    assert slow.tensor == full.tensor


@given(
    st.sampled_from([LLAMA, published("mixtral-8x7b"), published("deepseek-v3"), published("gpt2")]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from(list(ActivationCheckpointing)),
    st.sampled_from([*((each, False) for each in Precision), (Precision.BF16, True)]),
    st.sampled_from(sorted(ACCELERATORS)),
)
def test_every_layout_has_a_finite_cost(
    model: Architecture,
    tensor: int,
    pipeline: int,
    data: int,
    zero: int,
    recompute: ActivationCheckpointing,
    form: tuple[Precision, bool],
    gpu: str,
) -> None:
    strategy = Strategy(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        expert=data,
        zero_stage=zero,
        micro_batches=8,
        checkpointing=recompute,
        precision=form[0],
        fp8=form[1],
    )
    found = estimate(Workload(model, 1024, 8 * data), strategy, machine_for(ACCELERATORS[gpu]))
    assert 0.0 < found.seconds < float("inf")
    assert 0.0 < found.mfu < (2.0 if form[1] else 1.0)  # of the peak of bf16
    assert 0.0 <= found.bubble < 1.0
    assert found.memory.total > 0.0


def test_fits_is_the_estimates_memory() -> None:
    work = Workload(LLAMA, 8192, 64)
    for strategy in (Strategy(data=64), Strategy(tensor=8, pipeline=4, data=2, micro_batches=32, zero_stage=1)):
        memory = estimate(work, strategy, H100S).memory
        assert memory == memory_of(work, strategy, H100S)
        assert fits(work, strategy, H100S) == (memory.total <= H100.memory)
    assert not fits(work, Strategy(data=64), H100S)


def test_a_pair_never_seen_takes_its_accelerators_constants() -> None:
    assert constants_for("A100-SXM4-80GB", "megatron-lm") == FITTED["A100-SXM4-80GB", "megatron-lm"]
    assert constants_for("H100-SXM5-80GB", "meshwright").compute == pytest.approx(
        FITTED["H100-SXM5-80GB", "nanotron"].compute
    )
    assert constants_for("T4", "torchtitan").compute == pytest.approx(
        FITTED["H100-SXM5-96GB-HBM2E", "torchtitan"].compute
    )
    assert constants_for("T4", "none") == DEFAULT


def layouts() -> list[Strategy]:
    return [
        Strategy(tensor=t, pipeline=p, data=64 // (t * p), micro_batch_size=b, micro_batches=t * p // b)
        for t in (1, 2, 4, 8)
        for p in (1, 2, 4)
        for b in (1, 2)
        if t * p >= b
    ]


@pytest.mark.parametrize("truth", [Constants(1.2, 0.8, 1.5), Constants(0.7, 1.6, 0.5), Constants(1.0, 1.0, 1.0)])
def test_calibration_finds_the_constants_that_made_the_steps(truth: Constants) -> None:
    work, fabric = Workload(published("llama-2-7b"), 2048, 64), Fabric.of(A100)

    def step(strategy: Strategy, constants: Constants) -> float:
        return estimate(work, strategy, Machine(A100, fabric, FRAMEWORKS["megatron-lm"], constants)).seconds

    measured = [step(strategy, truth) for strategy in layouts()]
    estimates = [lambda constants, strategy=strategy: step(strategy, constants) for strategy in layouts()]
    found = calibrate(estimates, measured, prior_weight=1e-6)
    assert (found.compute, found.communication, found.host) == pytest.approx(
        (truth.compute, truth.communication, truth.host), rel=0.02
    )


def test_calibration_without_measurements_is_the_prior() -> None:
    prior = Constants(1.3, 0.9, 1.1)
    found = calibrate([], [], prior)
    assert (found.compute, found.communication, found.host) == pytest.approx((1.3, 0.9, 1.1))


def test_one_measurement_moves_what_it_can_tell() -> None:
    slow = calibrate([lambda constants: 10.0 * constants.compute + 0.1 * constants.host], [12.0])
    assert slow.compute == pytest.approx(1.19, abs=0.03)
    assert slow.communication == pytest.approx(1.0)


def test_an_outlier_does_not_pull_the_rest() -> None:
    estimates = [lambda constants: 10.0 * constants.compute] * 9
    found = calibrate(estimates, [11.0] * 8 + [40.0])
    assert found.compute == pytest.approx(1.1, abs=0.03)


@pytest.mark.parametrize("measured", [[1.0, 2.0], [0.0]])
def test_calibration_refuses_nonsense(measured: list[float]) -> None:
    with pytest.raises(ValueError, match="measure"):
        calibrate([lambda constants: constants.compute], measured)


@given(st.floats(0.0, 10.0), st.floats(1e-6, 10.0))
def test_launching_shows_only_where_kernels_are_shorter(launching: float, busy: float) -> None:
    shown = exposed_host(launching, busy)
    assert max(0.0, launching - busy) - 1e-9 <= shown <= launching + 1e-9


def test_a_collective_waits_for_the_slowest_of_its_ranks() -> None:
    # The largest of n exponential delays with mean 1 is H_n in the mean: 1.5 of 2 ranks, 11/6 of 3. All wait for it.
    assert jitter(1) == 0.0
    assert jitter(JITTER_RANKS) == pytest.approx(SYNCHRONIZE)
    assert jitter(3) / jitter(2) == pytest.approx((11 / 6 - 1) / 0.5)
    drawn = random.Random(4)
    slowest = [max(drawn.expovariate(1.0) for _ in range(64)) for _ in range(4000)]
    assert jitter(64) / jitter(2) == pytest.approx((mean(slowest) - 1.0) / 0.5, rel=0.03)


def test_the_host_launches_ahead_while_ranks_wait_for_each_other() -> None:
    # Where launches are longer than everything else, a wait fits in between: only longer kernels leave it exposed.
    split, model = Strategy(tensor=8, sequence_parallel=False), published("llama-3.2-1b")
    short, long = (estimate(Workload(model, length, 1), split, H100S).time for length in (64, 65536))
    waits = 4 * model.layers * SYNCHRONIZE * H100S.constants.host
    launches = 3 * model.layers * HOST_PER_LAYER * H100S.constants.host
    shown = short.total - short.optimizer
    assert shown == pytest.approx(launches + PER_STEP * H100S.constants.host, rel=0.05)
    assert long.host - PER_STEP * H100S.constants.host == pytest.approx(waits, rel=0.05)


def test_nanotron_adds_gradients_and_copies_gathered_parts_outside_the_passes() -> None:
    # 10 bytes of each parameter for each micro-batch; 6 tensors of 32 layers, from 8 replicas, once per step.
    runtime = FRAMEWORKS["nanotron"]
    other = replace(runtime, name="without", adds_gradients=0.0, gathered_tensors=0)
    model = published("llama-3-8b")
    work, strategy = Workload(model, 4096, 32), Strategy(data=8, zero_stage=1, micro_batches=4)
    times = [
        estimate(work, strategy, replace(H100S, runtime=each, constants=DEFAULT)).time for each in (runtime, other)
    ]
    added = 4 * 10 * model.parameters / (3.35e12 * 0.8)
    assert times[0].compute - times[1].compute == pytest.approx(added, rel=0.01)
    assert times[0].host - times[1].host == pytest.approx(8 * 6 * 32 * HOST_PER_COPY)
    alone = replace(strategy, zero_stage=0)
    assert estimate(work, alone, replace(H100S, runtime=runtime)).time.host == pytest.approx(
        estimate(work, alone, replace(H100S, runtime=other)).time.host
    )


def test_weights_pass_through_memory_with_every_micro_batch() -> None:
    # Cast 4 + 2 bytes, the gradient cast 2 + 4, added 4 + 4 + 4; none is cast without fp32 masters of its own.
    runtime = FRAMEWORKS["meshwright"]
    alone, several = Strategy(), Strategy(micro_batches=2)
    assert weight_pass_bytes(alone, runtime) == 6 + 6
    assert weight_pass_bytes(several, runtime) == 6 + 6 + 12
    assert weight_pass_bytes(replace(several, settings=MemoryOptions(master_gradient=2.0)), runtime) == 6
    assert weight_pass_bytes(replace(several, settings=MemoryOptions(master_weights=False)), runtime) == 6
    assert weight_pass_bytes(replace(several, precision=Precision.FP32), runtime) == 12
    assert weight_pass_bytes(replace(several, settings=MemoryOptions(adapters=(1, 1))), runtime) == 6
    assert weight_pass_bytes(several, FRAMEWORKS["megatron-lm"]) == 0


def test_narrow_heads_spend_more_on_the_softmax() -> None:
    # On one H200 the products of 64 numbers take less than the softmax of their score, those of 128 more.
    own, other = FRAMEWORKS["meshwright"], FRAMEWORKS["torchtitan"]
    assert flash_part(64, own) < 0.5 < flash_part(128, own)
    assert flash_part(64, other) == flash_part(128, other)


def test_gpus_of_labels_have_machines() -> None:
    gpu = accelerator("NVIDIA-H100-80GB-HBM3")
    assert gpu is not None
    assert machine_for(gpu).runtime.name == "meshwright"


def test_asynchronous_tensor_parallelism_hides_half_of_its_communication() -> None:
    plain = Strategy(tensor=8, data=8, micro_batches=8)
    work = Workload(LLAMA, 8192, 64)
    without, hiding = (
        estimate(work, strategy, H100S).time for strategy in (plain, replace(plain, tensor_overlap=True))
    )
    assert hiding.tensor == pytest.approx(without.tensor / 2)
    assert hiding.compute == without.compute
