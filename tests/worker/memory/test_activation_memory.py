"""What a stage keeps for its backward pass: bytes that are alive, against the closed forms, and the same gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.api.parallelism import ParallelismSpec
from meshwright.api.training import ActivationCheckpointing, TrainingSpec
from meshwright.data.tokenizers import BYTE_SEPARATOR
from meshwright.layout import Layout
from meshwright.models.architecture import Architecture
from meshwright.planner.cost.activations import layer_activations, saved_bytes
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.workload import TrainingJob
from meshwright.sequence_sharding import SequenceSharding
from meshwright_worker.data.batch import Batch, TokenMetadata, separate_documents
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.dropout import TensorSlice, apply_dropout
from meshwright_worker.models.init_weights import init_weights
from meshwright_worker.parallel.context.context_parallel import (
    ContextGroups,
    context_slice,
    install_context_attention,
)
from meshwright_worker.parallel.parallelize import apply_memory_options
from meshwright_worker.parallel.tensor.cross_entropy import use_chunked_loss

MODEL = Architecture(layers=9, hidden_size=64, intermediate_size=128, heads=4, kv_heads=2, vocab_size=1024)
ROWS, LENGTH = 2, 64
TOKENS = ROWS * LENGTH
CPU = torch.device("cpu")
HOW = ActivationCheckpointing


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors that operators made and that still exist; views of parameters are none."""

    def __init__(self, stage: DecoderStage) -> None:
        super().__init__()
        self._parameters = {parameter.untyped_storage()._cdata for parameter in stage.parameters()}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self._parameters:
                storage = leaf.untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        return result

    def bytes(self) -> int:
        self._made = {number: (made, size) for number, (made, size) in self._made.items() if not made.expired()}
        return sum(size for _, size in self._made.values())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stage_with(model: Architecture = MODEL, **training: Any) -> DecoderStage:
    with torch.device("meta"):
        stage = DecoderStage(model, torch.float32)
    init_weights(stage, model, 0, CPU)
    spec = TrainingSpec(steps=1, global_batch_size=ROWS, sequence_length=LENGTH, **training)
    apply_memory_options(stage, spec, CPU)
    if spec.dropout:
        apply_dropout(stage, MODEL.heads, spec, TensorSlice())
    return stage


def kept_by_layers(stage: DecoderStage) -> int:
    """Bytes alive after the layers' forward pass, their input counted and their output not."""
    x = torch.randn(ROWS, LENGTH, MODEL.hidden_size, requires_grad=True)
    layers: list[Any] = [*stage.layers.values()]
    with Alive(stage) as alive:
        out = stage.run_layers(layers, x, TokenMetadata())
        # The rotary table exists once for all layers.
        table = LENGTH * MODEL.head_size * 4
        kept = alive.bytes() - table
    assert out.grad_fn is not None
    return kept


@pytest.mark.parametrize(
    ("how", "every"),
    [(HOW.FULL, 1), (HOW.EVERY_K, 4), (HOW.SQRT, 1)],
)
def test_a_group_keeps_its_input(how: HOW, every: int) -> None:
    kept = kept_by_layers(stage_with(activation_checkpointing=how, checkpoint_every=every))
    strategy = Strategy(checkpointing=how, checkpoint_every=every)
    groups = -(-MODEL.layers // strategy.recompute_group(MODEL.layers))
    assert kept == pytest.approx(groups * TOKENS * MODEL.hidden_size * 4, rel=0.05)


@pytest.mark.parametrize(
    ("how", "every"), [(HOW.NONE, 1), (HOW.SELECTIVE, 1), (HOW.FULL, 1), (HOW.EVERY_K, 4), (HOW.SQRT, 1)]
)
@pytest.mark.parametrize("output_norms", [False, True])
def test_layers_keep_what_the_planner_counts(how: HOW, every: int, output_norms: bool) -> None:
    model = MODEL.model_copy(update={"output_norms": output_norms})
    spec = TrainingSpec(
        steps=1, global_batch_size=ROWS, sequence_length=LENGTH, activation_checkpointing=how, checkpoint_every=every
    )
    job = TrainingJob.from_parts(model, spec, ParallelismSpec(), 1)
    each = layer_activations(
        job.work.model, False, LENGTH, 1, False, job.training.precision, job.fixed.fp8, job.runtime
    )
    counted = TOKENS * saved_bytes(each, model.layers, job.strategy(Layout(), 1))
    kept = kept_by_layers(stage_with(model, activation_checkpointing=how, checkpoint_every=every))
    assert kept == pytest.approx(counted, rel=0.05)


def gradients(stage: DecoderStage) -> list[torch.Tensor]:
    tokens = torch.randint(0, MODEL.vocab_size, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    batch = Batch.of(tokens)
    stage(batch.tokens, targets=batch.targets, token_metadata=batch.token_metadata).backward()
    return [parameter.grad for parameter in stage.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("how", [HOW.FULL, HOW.SELECTIVE, HOW.EVERY_K, HOW.SQRT])
@pytest.mark.parametrize("offload", [False, True])
def test_gradients_are_the_same_bits(how: HOW, offload: bool) -> None:
    want = gradients(stage_with(dropout=0.1))
    got = gradients(stage_with(activation_checkpointing=how, activation_offload=offload, dropout=0.1))
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_full_logits_never_exist_in_a_chunked_loss() -> None:
    largest = []
    for chunk in (None, 16):
        stage = stage_with()
        if chunk:
            use_chunked_loss(stage, chunk, None, sequence=False)
        with Alive(stage) as alive:
            hidden = torch.randn(ROWS, LENGTH, MODEL.hidden_size, requires_grad=True)
            targets = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
            loss = stage.chunked_loss or (lambda x, output, wanted, s=stage: s.loss(output(x), wanted))
            loss(hidden, stage.output, targets).backward()
        largest.append(alive.largest)
    assert largest[0] == TOKENS * MODEL.vocab_size * 4
    assert largest[1] <= MODEL.vocab_size * MODEL.hidden_size * 4


def a_micro_batch(length: int, *, packed: bool, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, BYTE_SEPARATOR, (ROWS, length + 1), generator=generator)
    if not packed:
        return Batch.of(tokens)
    batch = separate_documents(Batch.of(tokens.masked_fill(tokens % 5 == 0, BYTE_SEPARATOR)), BYTE_SEPARATOR)
    return context_slice(batch, SequenceSharding(), 0)


@pytest.mark.parametrize("packed", [False, True], ids=["other lengths", "other documents, one kernel"])
def test_micro_batches_in_flight_are_recomputed_whichever_has_run_before(packed: bool) -> None:
    """A pipeline runs the next ones forward before it runs one backward. Layers cached what they need of the last one,
    so that `Selective` met operators that it had not seen, and the first step failed.
    """
    batches = [a_micro_batch(24 if packed else length, packed=packed, seed=length) for length in (24, 40, 32)]
    gradients: dict[ActivationCheckpointing, dict[str, torch.Tensor]] = {}
    for how in (HOW.NONE, HOW.SELECTIVE):
        stage = stage_with(activation_checkpointing=how)
        if packed:
            install_context_attention(stage, SequenceSharding(), ContextGroups(None, None), varlen=True)
        losses = [stage(batch.tokens, batch.targets, batch.token_metadata) for batch in batches]
        for loss in losses:
            loss.backward()
        gradients[how] = {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
    for name, want in gradients[HOW.NONE].items():
        torch.testing.assert_close(gradients[HOW.SELECTIVE][name], want)
