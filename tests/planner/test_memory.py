"""Memory against textbook closed forms, against itself, and against the modules that are really trained."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.api.precision import Precision
from meshwright.layout import Layout, split_layers
from meshwright.models.architecture import Architecture
from meshwright.models.presets import PRESETS
from meshwright.planner.memory import (
    StageMemory,
    Workload,
    layer_activations,
    rank_parameters,
    stage_memory,
    worst_stage,
)
from meshwright_worker.models.llama import DecoderStage

SEVEN = PRESETS["llama-2-7b"]


def workload(model: Architecture = SEVEN, **changes: object) -> Workload:
    values: dict[str, object] = {"sequence_length": 2048, "micro_batch_size": 1, "micro_batches": 1, **changes}
    return Workload(model, **values)  # type: ignore[arg-type]


def states(memory: StageMemory) -> int:
    return memory.parameters + memory.gradients + memory.optimizer


def test_model_states_are_sixteen_bytes_a_parameter() -> None:
    model = SEVEN.model_copy(update={"vocab_size": 64_000})  # 7.0 billion, as in the paper's example: 112 GB
    memory = stage_memory(workload(model), Layout(), 0)
    assert states(memory) == 16 * model.parameters
    assert states(memory) / 1e9 == pytest.approx(112, rel=0.01)


@pytest.mark.parametrize("replicas", [1, 2, 8, 64])
def test_zero_divides_what_it_shards(replicas: int) -> None:
    layout, size = Layout(data=replicas), SEVEN.parameters
    plain = stage_memory(workload(zero_stage=0), layout, 0)
    second = stage_memory(workload(zero_stage=2), layout, 0)
    third = stage_memory(workload(zero_stage=3), layout, 0)
    assert states(plain) == 16 * size
    if replicas == 1:
        assert states(second) == states(third) == 16 * size
        return
    shard = -(-size // replicas)
    assert (second.gradients, second.optimizer) == (4 * shard, 8 * shard)
    assert second.parameters == 4 * shard + 4 * size
    gathered = 2 * SEVEN.vocab_size * SEVEN.hidden_size + 2 * SEVEN.layer_parameters
    assert third.parameters == 4 * shard + 4 * gathered
    assert states(third) < states(second) < states(plain)


def test_accumulating_gradients_are_whole_until_the_last_micro_batch() -> None:
    memory = stage_memory(workload(zero_stage=2, micro_batches=4), Layout(data=8), 0)
    assert memory.gradients == 4 * SEVEN.parameters


def test_activations_are_the_published_form_with_the_decoders_own_terms() -> None:
    # Korthikanti et al., table 2: 34·s·b·h bytes per layer in 16 bits without parallelism or stored scores. Here no
    # dropout masks (-2); norms keep fp32 inputs beside their normed ones (12 instead of 4); SwiGLU keeps four tensors
    # of its width where GELU keeps two of 4h (8·f/h instead of 16). Statistics of norms and attention come on top.
    model = SEVEN
    published = 34 - 2 + 8 + (8 * model.intermediate_size / model.hidden_size - 16)
    statistics = 2 * 4 + 4 * model.heads
    ours = layer_activations(workload(model, precision=Precision.BF16), 1)
    assert ours == pytest.approx(2048 * (published * model.hidden_size + statistics))


def test_sequence_parallelism_divides_all_but_the_gathered_inputs() -> None:
    split = layer_activations(workload(precision=Precision.BF16), 8)
    whole = layer_activations(workload(precision=Precision.BF16, sequence_parallel=False), 8)
    alone = layer_activations(workload(precision=Precision.BF16), 1)
    gathered = 2 * 2 * 2048 * 4096
    assert split == pytest.approx(gathered + (alone - gathered) / 8, rel=1e-3)
    assert whole > split


def test_earlier_stages_hold_more_micro_batches_in_flight() -> None:
    layout = Layout(pipeline=4)
    kept = [stage_memory(workload(micro_batches=16), layout, stage).activations for stage in (1, 2)]
    assert kept[0] > kept[1]
    few = [stage_memory(workload(micro_batches=1), layout, stage).activations for stage in (1, 2)]
    assert few[0] == few[1]


def test_gradients_are_reduced_beside_nothing_else() -> None:
    memory = stage_memory(workload(sequence_length=8), Layout(data=2), 0)
    assert memory.reduction == 4 * SEVEN.parameters
    assert memory.total == states(memory) + memory.reduction


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
    st.integers(1, 32),
    st.sampled_from([0, 2, 3]),
    st.sampled_from(list(Precision)),
)
def test_the_worst_stage_is_the_worst_of_all(
    model: Architecture, layout: Layout, micro_batches: int, zero: int, precision: Precision
) -> None:
    asked = workload(model, micro_batches=micro_batches, zero_stage=zero, precision=precision)
    every = [stage_memory(asked, layout, stage).total for stage in range(layout.pipeline)]
    assert worst_stage(asked, layout).total == max(every)


@given(architectures, st.integers(1, 8), st.booleans())
def test_stages_hold_every_parameter_once(model: Architecture, pipeline: int, tied: bool) -> None:
    model = model.model_copy(update={"tie_embeddings": tied and pipeline == 1})
    layout = Layout(pipeline=pipeline)
    split = split_layers(model.layers, pipeline)
    total = sum(rank_parameters(model, layout, stage, len(split[stage])) for stage in range(pipeline))
    assert total == model.parameters


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


@pytest.mark.parametrize(("precision", "dtype"), [(Precision.FP32, torch.float32), (Precision.BF16, torch.bfloat16)])
def test_a_layer_keeps_what_autograd_keeps_of_the_real_one(precision: Precision, dtype: torch.dtype) -> None:
    more = SMALL.model_copy(update={"layers": 4})
    measured = kept_by_autograd(more, dtype) - kept_by_autograd(SMALL, dtype)
    asked = workload(SMALL, sequence_length=64, micro_batch_size=2, precision=precision)
    copies = 2 * SMALL.layer_parameters if precision is Precision.BF16 else 0
    assert measured == layer_activations(asked, 1) + copies
    assert stage_memory(asked, Layout(), 0).activations == 3 * layer_activations(asked, 1) + (
        2 * SMALL.parameters if copies else 0
    )
