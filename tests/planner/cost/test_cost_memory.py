"""Memory: the textbook closed forms, what every choice does to it, and measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.api.parallelism import ContextMethod
from meshwright.api.parallelism import PipelineSchedule as Schedule
from meshwright.api.precision import Precision
from meshwright.api.training import ActivationCheckpointing, OptimizerOffload
from meshwright.models.architecture import Architecture
from meshwright.models.counts import layer_counts
from meshwright.models.presets import published
from meshwright.planner.cost.activations import layer_activations, saved_bytes
from meshwright.planner.cost.frameworks import FRAMEWORKS, Framework
from meshwright.planner.cost.memory import memory_by_stage, worst_stage
from meshwright.planner.cost.stages import stage_parameters, stages_of
from meshwright.planner.cost.strategy import Strategy, Workload
from meshwright.planner.units import GIB, MIB, format_bytes

MEGATRON = FRAMEWORKS["megatron-lm"]
DEEPSPEED = FRAMEWORKS["megatron-deepspeed"]
SEVEN = published("llama-2-7b")
# 7.0 billion parameters, as in the ZeRO paper's example.
ROUND_SEVEN = SEVEN.model_copy(update={"vocab_size": 64_000, "name": "7b"})


def work(model: Architecture = SEVEN, batch: int = 8, sequence: int = 2048) -> Workload:
    return Workload(model, sequence, batch)


def gpt(layers: int, hidden: int, heads: int) -> Architecture:
    return Architecture(
        layers=layers,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        heads=heads,
        kv_heads=heads,
        vocab_size=51200,
        gated=False,
        biases=True,
        tie_embeddings=True,
    )


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 112.0), (1, 38.5), (2, 26.25), (3, 14.0)])
def test_the_zero_papers_example(stage: int, gigabytes: float) -> None:
    # ZeRO (arXiv 1910.02054, figure 1): 7 billion parameters; 16 bytes each, then sharded over 8.
    data = 1 if stage == 0 else 8
    memory = worst_stage(work(ROUND_SEVEN), Strategy(data=data, zero_stage=stage), DEEPSPEED)
    assert memory.states / 1e9 == pytest.approx(gigabytes, rel=0.01)


# Korthikanti et al. (arXiv 2205.05198, figure 1): GiB per GPU.
FIGURE_1 = [
    (48, 6144, 64, 8, 1, 4, 1, 45.56, 59.25, 9.5625),
    (96, 12288, 96, 8, 8, 1, 3, 45.56, 66.84, 12.35),
    (105, 20480, 128, 8, 35, 1, 3, 31.64, 114.02, 23.08),
    (128, 25600, 160, 8, 64, 1, 1, 32.96, 131.25, 26.56),
]


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "tp", "pp", "mbs", "vpp", "states", "none", "selective"), FIGURE_1
)
def test_figure_1_of_korthikanti(
    layers: int,
    hidden: int,
    heads: int,
    tp: int,
    pp: int,
    mbs: int,
    vpp: int,
    states: float,
    none: float,
    selective: float,
) -> None:
    model, tokens = gpt(layers, hidden, heads), 2048 * mbs
    assert 18 * 12 * layers * hidden**2 / (tp * pp) / GIB == pytest.approx(states, rel=2e-4)
    # The first stage holds L layers' worth of activations, and (p-1)/(p v) more when interleaved.
    depth = layers * (1 + (pp - 1) / (pp * vpp) if vpp > 1 else 1)
    for how, parallel, expected in (
        (ActivationCheckpointing.NONE, False, none),
        (ActivationCheckpointing.SELECTIVE, True, selective),
    ):
        strategy = Strategy(tensor=tp, checkpointing=how, sequence_parallel=parallel)
        layer = layer_activations(model, False, 2048, tp, parallel, Precision.FP16, False, MEGATRON)
        ours = saved_bytes(layer, 1, strategy) * tokens * depth / GIB
        assert ours == pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize(
    ("recompute", "parallel", "percent"),
    [
        (ActivationCheckpointing.NONE, True, 66.84),
        (ActivationCheckpointing.SELECTIVE, False, 49.42),
        (ActivationCheckpointing.SELECTIVE, True, 16.18),
        (ActivationCheckpointing.FULL, False, 7.64),
    ],
)
def test_figure_7_of_korthikanti(recompute: ActivationCheckpointing, parallel: bool, percent: float) -> None:
    # Activations of the 22B model relative to tensor parallelism alone, read off the figure.
    model = gpt(48, 6144, 64)

    def kept(how: ActivationCheckpointing, sequence_parallel: bool) -> float:
        layer = layer_activations(model, False, 2048, 8, sequence_parallel, Precision.FP16, False, MEGATRON)
        return saved_bytes(layer, 48, Strategy(tensor=8, checkpointing=how))

    assert 100 * kept(recompute, parallel) / kept(ActivationCheckpointing.NONE, False) == pytest.approx(
        percent, abs=1.0
    )


@given(
    st.sampled_from([SEVEN, published("deepseek-v2-lite")]),
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.sampled_from(list(Schedule)),
    st.sampled_from([1, 3, 16]),
    st.sampled_from(list(ActivationCheckpointing)),
    st.sampled_from(sorted(FRAMEWORKS)),
)
def test_the_worst_stage_is_the_worst_of_all(
    model: Architecture,
    split: list[int],
    schedule: Schedule,
    micro_batches: int,
    recompute: ActivationCheckpointing,
    runtime: str,
) -> None:
    model = model.model_copy(update={"layers": sum(split), "name": f"{model.name} {sum(split)}"})
    strategy = Strategy(
        pipeline=len(split),
        layer_split=tuple(split),
        schedule=schedule,
        virtual_stages=2 if schedule in (Schedule.INTERLEAVED, Schedule.LOOPED_BFS) else 1,
        micro_batches=micro_batches,
        checkpointing=recompute,
    )
    every = memory_by_stage(work(model), strategy, FRAMEWORKS[runtime])
    assert [memory.stage for memory in every] == list(range(len(split)))
    assert worst_stage(work(model), strategy, FRAMEWORKS[runtime]).total == max(memory.total for memory in every)


def test_the_second_stage_can_be_the_worst() -> None:
    # A first stage with fewer layers, as in Zero Bubble's runs.
    strategy = Strategy(pipeline=4, micro_batches=16, layer_split=(4, 10, 10, 8))
    assert worst_stage(work(), strategy, MEGATRON).stage == 1


models = st.sampled_from([SEVEN, published("qwen2.5-0.5b"), published("mixtral-8x7b"), published("deepseek-v2-lite")])


@given(models, st.sampled_from([1, 2, 4]), st.integers(1, 8), st.sampled_from([1, 2, 4]))
def test_stages_hold_every_parameter_once(model: Architecture, tensor: int, pipeline: int, expert: int) -> None:
    untied = model.model_copy(update={"tie_embeddings": False})
    strategy = Strategy(tensor=tensor, pipeline=pipeline, expert=expert, data=expert)
    held = [
        stage_parameters(untied, stage, tensor, strategy.expert_parts) for stage in stages_of(untied, strategy).every
    ]
    experts = sum(part.experts for part in held) * tensor * expert
    if untied.mixture is not None:
        assert experts == pytest.approx(untied.count_mixtures(0, untied.layers) * layer_counts(untied, True).experts)
    dense = sum(part.dense for part in held)
    if tensor == 1:
        assert dense + experts == pytest.approx(untied.parameters)
    assert dense * tensor + experts >= untied.parameters


@given(models, st.sampled_from([2, 4, 8]), st.integers(1, 4))
def test_more_sharding_never_holds_more(model: Architecture, data: int, micro_batches: int) -> None:
    totals = [
        worst_stage(
            work(model), Strategy(data=data, zero_stage=zero, micro_batches=micro_batches), FRAMEWORKS["meshwright"]
        ).states
        for zero in (0, 1, 2, 3)
    ]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize("runtime", FRAMEWORKS.values(), ids=lambda runtime: runtime.name)
def test_what_saves_memory_saves_memory(runtime: Framework) -> None:
    base = Strategy(tensor=2, pipeline=2, data=4, micro_batches=8)

    def total(**changes: object) -> float:
        return worst_stage(work(sequence=4096), replace(base, **changes), runtime).total

    plain = total()
    assert (
        total(checkpointing=ActivationCheckpointing.FULL)
        < total(checkpointing=ActivationCheckpointing.SELECTIVE)
        <= plain
    )
    assert total(checkpointing=ActivationCheckpointing.FULL, checkpoint_layers=8) < plain
    assert total(checkpointing=ActivationCheckpointing.FULL) < total(
        checkpointing=ActivationCheckpointing.FULL, checkpoint_layers=8
    )
    assert total(sequence_parallel=False) > plain
    assert total(context=2, data=2) < plain
    assert total(zero_stage=1) < plain
    assert total(optimizer_offload=OptimizerOffload.CPU) < plain
    assert total(activation_offload=True) < plain
    assert total(schedule=Schedule.GPIPE) > plain
    assert total(schedule=Schedule.ZB_H2) >= plain
    assert total(schedule=Schedule.DUAL_PIPE) > plain
    assert total(precision=Precision.FP32) > plain


def test_groups_of_recomputed_layers_trade_inputs_for_work() -> None:
    model = SEVEN.model_copy(update={"layers": 36, "name": "36 layers"})
    single = worst_stage(
        work(model), Strategy(checkpointing=ActivationCheckpointing.FULL, micro_batch_size=4), MEGATRON
    )
    root = worst_stage(work(model), Strategy(checkpointing=ActivationCheckpointing.SQRT, micro_batch_size=4), MEGATRON)
    assert single.activations / root.activations == pytest.approx(6)
    assert root.working / single.working == pytest.approx(6)


def test_experts_are_divided_over_their_group() -> None:
    model = published("mixtral-8x7b")
    whole = worst_stage(work(model), Strategy(data=8), MEGATRON)
    shared = worst_stage(work(model), Strategy(data=8, expert=8), MEGATRON)
    assert whole.parameters / shared.parameters > 5
    assert shared.buffers > whole.buffers


def test_context_parallelism_divides_what_tokens_need() -> None:
    one = worst_stage(work(sequence=32768), Strategy(), MEGATRON)
    four = worst_stage(work(sequence=32768), Strategy(context=4), MEGATRON)
    assert four.logits * 4 == pytest.approx(one.logits)
    assert four.parameters == one.parameters


def test_gathered_keys_and_values_take_room() -> None:
    held = {
        method: worst_stage(work(sequence=32768), Strategy(context=4, context_method=method), MEGATRON).buffers
        for method in ContextMethod
    }
    assert held[ContextMethod.ULYSSES] < held[ContextMethod.RING_ZIG_ZAG] < held[ContextMethod.ALL_GATHER]
    # Keys and values of 4 x 8192 tokens, 32 heads of 128 each, in 16 bits.
    assert held[ContextMethod.ALL_GATHER] - held[ContextMethod.ULYSSES] == 4 * 8192 * 2 * 4096 * 2


def test_fp8_keeps_copies_of_weights() -> None:
    half, eight = (worst_stage(work(), Strategy(fp8=fp8), FRAMEWORKS["megatron-core"]) for fp8 in (False, True))
    assert eight.buffers - half.buffers == 2 * SEVEN.parameters
    assert eight.activations < half.activations


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tensor": 0}, "`tensor`"),
        ({"expert": 3, "data": 4}, "`expert`"),
        ({"zero_stage": 4}, "`zero_stage`"),
        ({"micro_batch_size": 0}, "`micro_batch_size`"),
        ({"checkpoint_every": 0}, "`checkpoint_every`"),
    ],
)
def test_impossible_strategies_are_refused(changes: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Strategy(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "named"),
    [(Strategy(pipeline=64), "64 pipeline ranks"), (Strategy(pipeline=2, layer_split=(30, 3)), "`layer_split`")],
)
def test_layers_that_cannot_be_split_are_refused(strategy: Strategy, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        worst_stage(work(), strategy, MEGATRON)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (512, "512 B"),
        (1.5 * 1024, "1.5 KiB"),
        (999 * MIB, "999 MiB"),
        (1010 * MIB, "1,010 MiB"),
        (12.34 * GIB, "12.3 GiB"),
        (2048 * GIB, "2 TiB"),
    ],
)
def test_bytes_have_three_digits_and_no_exponent(count: float, text: str) -> None:
    assert format_bytes(count) == text
