"""Which runs this runtime can execute, decided from numbers alone.

A combination that would fail or train something else is refused here, with the field and the nearest values that work:
by the planner, before a pod exists, and by each rank once more, since a mismatch found inside a collective would show
as a hang of all of them. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.api.data import DataSpec, Packing, Tokenizer
from meshwright.api.model_parts import Activation, Norm
from meshwright.api.training import TrainingSpec
from meshwright.data.tokenizers import BYTE_VOCABULARY
from meshwright.models.architecture import Architecture
from meshwright.models.lora import missing_adapter_problem
from meshwright.protocol.run_config import NativeRun
from meshwright.rules.nearest import nearest
from meshwright.rules.resolved.compatibility import combination_problems
from meshwright.rules.resolved.context import context_problems
from meshwright.rules.resolved.data_parallel import replica_problems
from meshwright.rules.resolved.experts import expert_problems
from meshwright.rules.resolved.pipeline import pipeline_problems
from meshwright.rules.resolved.precision_memory import memory_problems


def run_problems(run: NativeRun) -> list[str]:
    """Why ranks would refuse a run of this runtime: each sentence names the field and what would do; none if they would
    not. What only files or devices can tell is not among them.
    """
    model, data, training = run.architecture, run.data, run.training
    problems = list(expert_problems(run, model))
    if run.data_parallel * run.context % run.expert:
        # There is no layout, and so nothing else to check.
        return problems
    return [
        *problems,
        *_model_problems(model),
        *_length_problems(model, training),
        *_evaluation_problems(training, data),
        *_tensor_problems(run, model, training),
        *context_problems(run, model, training),
        *pipeline_problems(run, model, training),
        *_training_problems(run, training),
        *_adapter_problems(model, training),
        *memory_problems(run, training),
        *replica_problems(run),
        *combination_problems(run, training),
        *_data_problems(run, model, data),
    ]


def _model_problems(model: Architecture) -> Iterator[str]:
    hidden, heads = model.hidden_size, model.heads
    if model.head_size == hidden // heads and (hidden % heads or model.head_size % 2):
        nearest_values = nearest(heads, lambda n: hidden % n == 0 and hidden // n % 2 == 0, hidden)
        yield (
            f"`model.heads: {heads}` must divide `model.hiddenSize: {hidden}` into even widths; nearest: "
            f"{nearest_values}"
        )
    if heads % model.kv_heads:
        nearest_values = nearest(model.kv_heads, lambda n: heads % n == 0, heads)
        yield f"`model.kvHeads: {model.kv_heads}` must divide `model.heads: {heads}`; nearest: {nearest_values}"
    if model.rope_size % 2:
        name = "model.latent.ropeSize" if model.latent else "model.headSize"
        yield f"`{name}: {model.rope_size}` must be even; nearest: {model.rope_size - 1}, {model.rope_size + 1}"
    if model.biases and model.norm is not Norm.LAYER_NORM:
        yield f"`model.biases: true` needs `model.norm: LayerNorm`, not `{model.norm}`"
    if model.latent and (model.kv_heads != heads or model.biases or model.attention_biases or model.query_key_norms):
        yield (
            f"`model.latent` needs `model.kvHeads: {heads}`, and excludes `model.biases`, `model.attentionBiases` and "
            "`model.queryKeyNorms`"
        )
    if model.mixture is not None and (not model.gated or model.biases or model.activation is not Activation.SILU):
        yield "`model.mixture` needs `model.gated: true`, `model.activation: SiLU` and no `model.biases`"
    if model.positions and (model.latent or model.rope_scaling):
        yield "`model.positions` excludes `model.latent` and `model.ropeScaling`: both turn by rotary positions"


def _adapter_problems(model: Architecture, training: TrainingSpec) -> Iterator[str]:
    if training.lora is not None and (problem := missing_adapter_problem(training.lora, model)):
        yield f"`training.lora.targets`: {problem}"


def _tensor_problems(run: NativeRun, model: Architecture, training: TrainingSpec) -> Iterator[str]:
    divisible = {
        "model.heads": model.heads,
        "model.kvHeads": model.kv_heads,
        "model.intermediateSize": model.intermediate_size,
        "model.vocabSize": model.vocab_size,
    }
    if run.parallelism.sequence:
        divisible["training.sequenceLength"] = training.sequence_length
    if not_divided := {name: value for name, value in divisible.items() if value % run.tensor}:
        nearest_values = nearest(run.tensor, lambda n: not any(value % n for value in divisible.values()), model.heads)
        for name, value in not_divided.items():
            yield (
                f"`parallelism.tensor: {run.tensor}` must divide `{name}: {value}`; nearest that fit: {nearest_values}"
            )
    if run.parallelism.tensor_overlap:
        yield from _overlap_problems(run, training)


def _overlap_problems(run: NativeRun, training: TrainingSpec) -> Iterator[str]:
    if run.tensor == 1 or not run.parallelism.sequence:
        yield (
            "`parallelism.tensorOverlap: true` needs `parallelism.sequence: true` and `parallelism.tensor` of at least "
            f"2, not {run.tensor}: it takes the collectives of sequence parallelism apart"
        )
    if training.fp8 is not None or training.lora is not None:
        yield (
            "`parallelism.tensorOverlap: true` needs `training.fp8` and `training.lora` left out: fp8 scales are of "
            "whole tensors, and adapters are too narrow to hide anything"
        )


def _training_problems(run: NativeRun, training: TrainingSpec) -> Iterator[str]:
    parts = run.data_parallel * run.micro_batches
    batch = training.global_batch_size
    if batch % parts:
        nearest_values = nearest(batch, lambda n: n % parts == 0, batch + parts)
        yield (
            f"`training.globalBatchSize: {batch}` must be divisible by `replicas: {run.data_parallel}` times "
            f"`parallelism.microBatches: {run.micro_batches}`; nearest: {nearest_values}"
        )
    optimizer = training.optimizer
    if optimizer.min_learning_rate > optimizer.learning_rate:
        yield (
            f"`training.optimizer.minLearningRate: {optimizer.min_learning_rate}` must not be above "
            f"`training.optimizer.learningRate: {optimizer.learning_rate}`"
        )


def _length_problems(model: Architecture, training: TrainingSpec) -> Iterator[str]:
    if 0 < model.positions < training.sequence_length:
        yield (
            f"`training.sequenceLength: {training.sequence_length}` must be at most "
            f"`model.positions: {model.positions}`: each position needs a row"
        )


def _evaluation_problems(training: TrainingSpec, data: DataSpec) -> Iterator[str]:
    if training.evaluation is not None and not data.held_out:
        yield "`training.evaluation` needs `data.heldOut` above 0: it is measured on documents that are not trained on"


def _data_problems(run: NativeRun, model: Architecture, data: DataSpec) -> Iterator[str]:
    # What the files of other tokenizers need is not known without reading them: `data.vocabulary` does.
    if data.tokenizer is Tokenizer.BYTE and model.vocab_size < BYTE_VOCABULARY:
        yield (
            f"`model.vocabSize: {model.vocab_size}` must be at least {BYTE_VOCABULARY} for `data.tokenizer: Byte`; "
            f"nearest: {-(-BYTE_VOCABULARY // run.tensor) * run.tensor}"
        )
    if data.balance and data.packing is not Packing.DOCUMENTS:
        yield "`data.balance: true` needs `data.packing: Documents`: without documents every row costs the same"
