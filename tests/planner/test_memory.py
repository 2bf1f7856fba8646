"""What a job's ranks need, with its real settings: closed forms, what each setting does, the modules really trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.api.lora import LoraSpec, LoraTarget
from meshwright.api.parallelism import ParallelismSpec, PipelineSchedule
from meshwright.api.precision import Precision
from meshwright.api.training import TrainingSpec
from meshwright.layout import Layout
from meshwright.models.architecture import Architecture
from meshwright.models.lora import adapter_parameters
from meshwright.models.presets import PRESETS
from meshwright.planner.cost.activations import layer_activations, requantizes
from meshwright.planner.cost.memory import Memory, memory_by_stage
from meshwright.planner.errors import PlanError
from meshwright.planner.plan import make_plan
from meshwright.planner.workload import TrainingJob
from meshwright_worker.models.decoder import DecoderStage
from tests.planner.builders import inventory, racks, spec_of

SEVEN = PRESETS["llama-2-7b"]


def job(
    model: Architecture = SEVEN, layout: Layout | None = None, micro_batches: int = 1, **changes: Any
) -> TrainingJob:
    """A job with one sequence a micro-batch; `parallelism` and fields of `training` by keyword."""
    parallelism = ParallelismSpec(**changes.pop("parallelism", {}))
    length, rows = changes.pop("sequence_length", 2048), changes.pop("rows", 1)
    data = (layout or Layout()).data
    training = TrainingSpec(
        steps=1,
        global_batch_size=rows * data * micro_batches,
        sequence_length=length,
        **{"precision": "fp32"} | changes,
    )
    return TrainingJob.from_parts(model, training, parallelism, data)


def stages(
    model: Architecture = SEVEN, layout: Layout | None = None, micro_batches: int = 1, **changes: Any
) -> list[Memory]:
    layout = layout or Layout()
    asked = job(model, layout, micro_batches, **changes)
    return memory_by_stage(asked.work, asked.strategy(layout, micro_batches), asked.runtime)


def first(*args: Any, **changes: Any) -> Memory:
    return stages(*args, **changes)[0]


def activations_of_a_layer(
    asked: TrainingJob, tensor: int = 1, *, mixture: bool = False, spread: bool = False
) -> float:
    """Bytes that one layer keeps of one token."""
    model, split = asked.work.model, asked.parallelism.sequence and tensor > 1
    rest = (asked.work.sequence_length, tensor, split, asked.training.precision, asked.fixed.fp8, asked.runtime, spread)
    return layer_activations(model, mixture, *rest).kept


def test_model_states_are_sixteen_bytes_a_parameter() -> None:
    model = SEVEN.model_copy(update={"vocab_size": 64_000})  # 7.0 billion, as in the paper's example: 112 GB
    memory = first(model)
    assert memory.states == 16 * model.parameters
    assert memory.states / 1e9 == pytest.approx(112, rel=0.01)


@pytest.mark.parametrize("replicas", [2, 8, 64])
def test_zero_divides_what_it_shards(replicas: int) -> None:
    layout, size = Layout(data=replicas), SEVEN.parameters
    plain, one, two, three = (first(layout=layout, parallelism={"zero_stage": stage}) for stage in (0, 1, 2, 3))
    assert plain.states == 16 * size
    shard = size / replicas
    # On flat shards parameters stay whole and gradients are until their step ends.
    assert (one.parameters, one.gradients, one.optimizer) == (4 * size, 4 * size, pytest.approx(8 * shard))
    assert (two.parameters, two.gradients, two.optimizer) == tuple(pytest.approx(n * shard) for n in (4, 4, 8))
    assert two.gathered == 4 * size
    gathered = 2 * SEVEN.vocab_size * SEVEN.hidden_size + 2 * SEVEN.layer_parameters
    assert three.gathered == 4 * gathered
    held = [memory.states + memory.gathered for memory in (plain, one, two, three)]
    assert held == sorted(held, reverse=True)


def test_a_single_replica_has_nobody_to_share_with() -> None:
    assert all(first(parallelism={"zero_stage": stage}).states == 16 * SEVEN.parameters for stage in (1, 2, 3))


def test_accumulating_gradients_are_whole_until_the_last_micro_batch() -> None:
    layout = Layout(data=8)
    assert first(layout=layout, micro_batches=4, parallelism={"zero_stage": 2}).gradients == 4 * SEVEN.parameters
    flat = {"zero_stage": 2, "data_parallel": {"strategy": "ZeRO"}}
    reduced = first(layout=layout, micro_batches=4, parallelism=flat).gradients
    assert reduced < SEVEN.parameters  # each micro-batch's are reduced, bucket by bucket
    late = first(layout=Layout(pipeline=2, data=8), micro_batches=4, parallelism={**flat, "schedule": "ZBH1"})
    assert late.gradients == first(layout=Layout(pipeline=2, data=8), micro_batches=4).gradients


def test_gradients_reduced_every_micro_batch_are_shards() -> None:
    layout, each = Layout(data=8), {"zero_stage": 3, "data_parallel": {"reduce_every_micro_batch": True}}
    reduced = first(layout=layout, micro_batches=4, parallelism=each)
    alone = first(layout=layout, micro_batches=1, parallelism={"zero_stage": 3})
    assert reduced.gradients == 4 * SEVEN.parameters / 8
    # With one micro-batch nothing accumulates anyway.
    assert (reduced.gradients, reduced.buffers) == (alone.gradients, alone.buffers)
    split = Layout(pipeline=2, data=8)
    late = first(layout=split, micro_batches=4, parallelism={**each, "schedule": "ZBH1"})
    whole = first(layout=split, micro_batches=4, parallelism={**each, "schedule": "1F1B"})
    # The first half computes gradients of the embedding, which wait as the second half reduces layers.
    assert late.gradients == whole.gradients
    assert late.buffers > whole.buffers


@pytest.mark.parametrize("stage", [2, 3])
def test_a_gather_in_fp8_halves_what_is_gathered_of_layers(stage: int) -> None:
    layout, tables = Layout(data=8), 2 * SEVEN.vocab_size * SEVEN.hidden_size
    eight, small = (
        first(layout=layout, parallelism={"zero_stage": stage}, precision="bf16", fp8=fp8)
        for fp8 in ({}, {"all_gather": True})
    )
    weights = SEVEN.parameters - tables
    of_layers = weights if stage == 2 else 2 * SEVEN.layer_parameters
    assert eight.gathered == pytest.approx(2 * (tables + of_layers), rel=1e-3)
    # This rank's quantized rows stay.
    assert small.gathered == pytest.approx(2 * tables + of_layers + weights / 8, rel=1e-3)


def test_shards_of_some_replicas_are_larger_than_of_all() -> None:
    layout = Layout(data=8)
    whole = first(layout=layout, parallelism={"zero_stage": 3})
    half = first(layout=layout, parallelism={"zero_stage": 3, "data_parallel": {"shard_size": 4}})
    assert half.optimizer == pytest.approx(2 * whole.optimizer)
    second = first(layout=layout, parallelism={"zero_stage": 3, "data_parallel": {"reshard_size": 4}})
    assert second.gathered - whole.gathered == pytest.approx(SEVEN.parameters)


@pytest.mark.parametrize(
    ("layout", "changes", "again"),
    [
        (Layout(), {}, True),
        (Layout(), {"fp8": {"scaling": "Rowwise"}}, True),
        (Layout(), {"fp8": {"update": "Delayed"}}, False),
        (Layout(), {"compile": False}, False),
        (Layout(tensor=2), {}, False),
        (Layout(context=2), {}, False),
        (Layout(pipeline=2), {}, True),
        (Layout(pipeline=2), {"parallelism": {"schedule": "ZBH1"}}, False),
    ],
)
def test_compiled_layers_quantize_again_what_others_store(layout: Layout, changes: dict[str, Any], again: bool) -> None:
    changes = {"precision": "bf16", "compile": True, "fp8": {}, "activation_checkpointing": "None", **changes}
    counted, half = (first(layout=layout, **{**changes, "fp8": fp8}) for fp8 in (changes["fp8"], None))
    asked = job(layout=layout, **changes)
    assert requantizes(asked.strategy(layout, 1), asked.runtime) is again
    # Of the copies of weights in bf16, only those of the tables stay.
    tables = 2 * SEVEN.vocab_size * SEVEN.hidden_size * (1 if layout.pipeline > 1 else 2)
    assert (counted.parameters == pytest.approx(tables)) is again
    assert (counted.parameters == half.parameters) is not again
    assert not again or counted.activations < half.activations


def test_one_chunk_of_a_compiled_loss_has_its_gradient_when_the_logits_are_gone() -> None:
    model, tokens = SEVEN, 2048
    changes = {"precision": "bf16", "compile": True, "sequence_length": tokens}
    one, two = (first(loss_chunk_tokens=chunk, **changes).logits for chunk in (tokens, tokens // 2))
    matrix, hidden = model.vocab_size * model.hidden_size, 2 * tokens * model.hidden_size
    assert one == pytest.approx(max(4 * tokens * model.vocab_size, 6 * matrix + hidden) + hidden)
    assert two == pytest.approx(3 * tokens * model.vocab_size + 6 * matrix + hidden)


def test_activations_are_the_published_form_with_the_decoders_own_terms() -> None:
    # Korthikanti et al., table 2: 34·s·b·h bytes per layer in 16 bits without parallelism or stored scores. Here no
    # dropout masks (-2); norms keep fp32 inputs beside their normed ones (12 instead of 4); SwiGLU keeps four tensors
    # of its width where GELU keeps two of 4h (8·f/h instead of 16). Statistics of norms and attention come on top.
    model = SEVEN
    published = 34 - 2 + 8 + (8 * model.intermediate_size / model.hidden_size - 16)
    statistics = 2 * 4 + 4 * model.heads
    ours = activations_of_a_layer(job(precision="bf16"))
    assert ours == pytest.approx(published * model.hidden_size + statistics)


def test_sequence_parallelism_divides_all_but_the_gathered_inputs() -> None:
    split = activations_of_a_layer(job(precision="bf16"), 8)
    whole = activations_of_a_layer(job(precision="bf16", parallelism={"sequence": False}), 8)
    alone = activations_of_a_layer(job(precision="bf16"))
    gathered = 2 * 2 * 4096
    assert split == pytest.approx(gathered + (alone - gathered) / 8, rel=1e-3)
    assert whole > split


def test_earlier_stages_hold_more_micro_batches_in_flight() -> None:
    several = stages(layout=Layout(pipeline=4), micro_batches=16)
    assert several[1].activations > several[2].activations
    few = stages(layout=Layout(pipeline=4), micro_batches=1)
    assert few[1].activations == few[2].activations


@pytest.mark.parametrize("schedule", list(PipelineSchedule))
def test_every_schedule_of_the_runtime_is_counted(schedule: PipelineSchedule) -> None:
    asked = {"schedule": schedule, "pipeline": 4}
    held = stages(layout=Layout(pipeline=4), micro_batches=16, parallelism=asked)
    classic = stages(layout=Layout(pipeline=4), micro_batches=16)
    assert len(held) == 4
    assert (held[0].activations < classic[0].activations) is (schedule is PipelineSchedule.NAIVE)
    copies = schedule in (PipelineSchedule.PIPEDREAM, PipelineSchedule.PIPEDREAM_2BW, PipelineSchedule.DUAL_PIPE)
    assert (held[0].parameters > 1.5 * classic[0].parameters) is copies


def test_an_automatic_schedule_holds_what_its_limit_allows() -> None:
    roomy, tight = (
        first(layout=Layout(pipeline=4), micro_batches=16, parallelism={"schedule": "Automatic", "activation_limit": n})
        for n in (7, 2)
    )
    assert roomy.activations == pytest.approx(3.5 * tight.activations, rel=0.01)


def test_an_uneven_split_is_counted_stage_by_stage() -> None:
    asked = {"pipeline": 4, "layer_split": [4, 10, 10, 8]}
    held = stages(layout=Layout(pipeline=4), micro_batches=16, parallelism=asked)
    assert max(held, key=lambda memory: memory.total).stage == 1
    folded = {"pipeline": 2, "schedule": "ZBV", "layer_split": [4, 6, 10, 12]}
    there, back = stages(layout=Layout(pipeline=2), micro_batches=8, parallelism=folded)
    assert there.parameters - 4 * 2 * SEVEN.vocab_size * SEVEN.hidden_size - 4 * SEVEN.norm_parameters == (
        back.parameters
    )


SAVINGS: list[tuple[dict[str, Any], str]] = [
    ({"activation_checkpointing": "Full"}, "activations"),
    ({"activation_checkpointing": "Selective"}, "activations"),
    ({"activation_checkpointing": "EveryK", "checkpoint_every": 4}, "activations"),
    ({"activation_checkpointing": "Sqrt"}, "activations"),
    ({"activation_offload": True}, "activations"),
    ({"parallelism": {"rematerialize": True}}, "activations"),
    ({"loss_chunk_tokens": 256}, "logits"),
    ({"optimizer": {"offload": "CPU"}}, "optimizer"),
    ({"optimizer": {"offload": "File", "offload_path": "/state"}}, "optimizer"),
    ({"optimizer": {"name": "Muon"}}, "optimizer"),
    ({"master_weights": False}, "master"),
    ({"lora": {"rank": 16}}, "gradients"),
]


@pytest.mark.parametrize(("saving", "kind"), SAVINGS)
def test_what_a_job_saves_is_not_counted(saving: dict[str, Any], kind: str) -> None:
    held = {"layout": Layout(data=2), "micro_batches": 2, "sequence_length": 8192, "precision": "bf16"}
    plain, saved = first(**held), first(**held, **saving)
    assert getattr(saved, kind) < 0.8 * getattr(plain, kind)
    assert saved.total < plain.total


@pytest.mark.parametrize("targets", [["Query", "Value"], ["Output", "Gate", "Down"]])
@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-deepseek"])
def test_adapters_are_counted_where_layers_have_them(name: str, targets: list[str]) -> None:
    model, lora = PRESETS[name], LoraSpec(rank=8, targets=[LoraTarget(target) for target in targets])
    adapters = adapter_parameters(lora, model)
    alone = first(model, lora=lora)
    assert (alone.gradients, alone.optimizer) == (4 * adapters, 8 * adapters)
    staged = stages(model, Layout(pipeline=2), 2, lora=lora)
    assert sum(memory.optimizer for memory in staged) == 8 * adapters


def test_offloaded_parameters_leave_what_is_gathered() -> None:
    asked = {"layout": Layout(data=4), "parallelism": {"zero_stage": 3, "sequence": False}, "precision": "bf16"}
    off = first(**asked, parameter_offload=True)
    assert off.states == 0
    assert off.gathered == first(**asked).gathered > 0


def test_what_a_job_adds_is_counted() -> None:
    asked: dict[str, Any] = {"layout": Layout(data=4), "precision": "bf16"}
    plain = first(**asked)
    outer = first(**asked, outer={"method": "DiLoCo"})
    assert outer.optimizer == plain.optimizer + 8 * SEVEN.parameters
    kept = first(**asked, parallelism={"data_parallel": {"compression": "PowerSGD"}})
    assert kept.gradients == 2 * plain.gradients
    assert first(**asked, attention_dropout=0.1).activations > 2 * plain.activations
    double = first(layout=Layout(data=4), precision="fp64")
    single = first(layout=Layout(data=4), precision="fp32")
    assert double.states == 2 * single.states


def test_gradients_wait_for_their_sum_bucket_by_bucket() -> None:
    alone, several = first(layout=Layout()), first(layout=Layout(data=2))
    table = SEVEN.vocab_size * SEVEN.hidden_size
    assert several.buffers - alone.buffers == 4 * 2 * table
    large = first(layout=Layout(data=2), parallelism={"data_parallel": {"bucket_elements": 10**9}})
    assert large.buffers - alone.buffers == 4 * 10**9


def test_a_job_is_admitted_by_what_it_will_really_hold() -> None:
    cluster = inventory(*racks(1, 1, 8))
    asked: dict[str, Any] = {
        "model": {"preset": "llama-3-8b"},
        "replicas": 8,
        "workers": {"image": "worker", "gpusPerWorker": 8},
        "parallelism": {"tensor": 1, "pipeline": 1, "microBatches": 1, "zeroStage": 3, "context": 1},
    }
    training: dict[str, Any] = {"steps": 1, "globalBatchSize": 8, "sequenceLength": 16384, "precision": "bf16"}
    with pytest.raises(PlanError, match="does not fit") as refused:
        make_plan(spec_of(**asked, training={**training, "activationCheckpointing": "None"}), cluster)
    assert "activations" in str(refused.value)
    saved = spec_of(**asked, training={**training, "activationCheckpointing": "Full", "lossChunkTokens": 1024})
    assert make_plan(saved, cluster).memory is not None


architectures = st.builds(
    lambda layers, intermediate, kv_heads, vocabulary: Architecture(
        layers=layers,
        hidden_size=256,
        intermediate_size=intermediate,
        heads=8,
        kv_heads=kv_heads,
        vocab_size=vocabulary,
    ),
    st.integers(8, 40),
    st.sampled_from([256, 1024]),
    st.sampled_from([2, 8]),
    st.sampled_from([320, 32_000, 500_000]),
)


@given(
    architectures,
    st.builds(Layout, tensor=st.sampled_from([1, 2]), pipeline=st.integers(1, 8), data=st.integers(1, 4)),
    st.sampled_from([1, 8, 32]),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from([Precision.FP32, Precision.BF16]),
    st.sampled_from(list(PipelineSchedule)),
)
def test_the_worst_stage_is_the_worst_of_all(
    model: Architecture, layout: Layout, micro_batches: int, zero: int, precision: Precision, schedule: PipelineSchedule
) -> None:
    asked = {"zero_stage": zero, "schedule": schedule}
    if 2 * layout.pipeline > model.layers:
        return
    every = stages(model, layout, micro_batches, parallelism=asked, precision=precision)
    own = job(model, layout, micro_batches, parallelism=asked, precision=precision)
    assert own.memory(own.strategy(layout, micro_batches)).total == max(memory.total for memory in every)
    assert all(value >= 0 for memory in every for value in (memory.states, memory.activations, memory.buffers))


SMALL = Architecture(layers=3, hidden_size=256, intermediate_size=512, heads=8, kv_heads=2, vocab_size=512)


def kept_by_autograd(model: Architecture, precision: torch.dtype) -> int:
    """Bytes that one forward pass of the real modules keeps, parameters not counted."""
    stage = DecoderStage(model, precision)
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    own = {parameter.untyped_storage().data_ptr() for parameter in stage.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.zeros(2, 64, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = stage(tokens, targets=tokens)
    assert loss.ndim == 0
    return sum(kept.values())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_layer_keeps_what_autograd_keeps_of_the_real_one(precision: str, dtype: torch.dtype) -> None:
    more = SMALL.model_copy(update={"layers": 4})
    measured = kept_by_autograd(more, dtype) - kept_by_autograd(SMALL, dtype)
    asked: dict[str, Any] = {"sequence_length": 64, "rows": 2, "precision": precision}
    copies = 2 * SMALL.layer_parameters if precision == "bf16" else 0
    assert measured == 128 * activations_of_a_layer(job(SMALL, **asked)) + copies
    held, grown = first(SMALL, **asked), first(more, **asked)
    assert grown.activations - held.activations == measured - copies
    if copies:
        assert grown.parameters - held.parameters == copies


PUBLISHED: dict[str, Any] = {"precision": "bf16", "sequence_length": 128}
"""Of ZeRO with sharded master weights (arXiv 1910.02054, figure 1)."""


@pytest.mark.parametrize(
    ("zero", "gradients", "gigabytes"), [(1, "bf16", 38.5), (2, "bf16", 26.25), (1, "fp32", 52.5), (2, "fp32", 28.0)]
)
def test_sharded_masters_of_seven_billion_parameters_on_eight_ranks(
    zero: int, gradients: str, gigabytes: float
) -> None:
    model = SEVEN.model_copy(update={"intermediate_size": 11674})
    assert model.parameters == pytest.approx(7e9, rel=1e-4)
    found = first(
        model,
        Layout(data=8),
        sharded_masters={"gradients": gradients},
        parallelism={"zero_stage": zero, "data_parallel": {"strategy": "ZeRO", "bucket_elements": 1}},
        **PUBLISHED,
    )
    # Gradients of stage 2 arrive in a bucket, which the tables of this model fill.
    bucket = (2 if gradients == "bf16" else 4) * 2 * model.vocab_size * model.hidden_size if zero == 2 else 0
    assert found.states - bucket == pytest.approx(gigabytes * 1e9, rel=1e-3)
    without = first(
        model, Layout(data=8), parallelism={"zero_stage": zero, "data_parallel": {"strategy": "ZeRO"}}, **PUBLISHED
    )
    assert found.states < 0.7 * without.states


def test_a_job_with_sharded_masters_fits_where_fp32_parameters_do_not() -> None:
    """The planner chooses the stage that the job leaves out; without the field every stage of ZeRO needs more."""
    cluster = inventory(*racks(1, 1, 8))
    asked: dict[str, Any] = {
        "model": {"preset": "llama-2-13b"},
        "replicas": 8,
        "workers": {"image": "worker", "gpusPerWorker": 8},
        "parallelism": {"tensor": 1, "pipeline": 1, "context": 1, "dataParallel": {"strategy": "ZeRO"}},
    }
    training: dict[str, Any] = {"steps": 1, "globalBatchSize": 8, "sequenceLength": 4096, "precision": "bf16"}
    with pytest.raises(PlanError, match="does not fit"):
        make_plan(spec_of(**asked, training=training), cluster)
    plan = make_plan(spec_of(**asked, training={**training, "shardedMasters": {}}), cluster)
    assert plan.strategy.zero_stage in (1, 2)
    assert plan.strategy.shards_masters
