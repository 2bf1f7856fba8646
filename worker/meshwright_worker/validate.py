"""Which runs this runtime can execute, decided from numbers alone before any process group forms.

A combination that would fail or train something else is refused here, with the field and the nearest values that work;
a mismatch found inside a collective would show as a hang of all ranks. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.api.data import DataSpec, Tokenizer
from meshwright.api.spec import TrainingSpec
from meshwright.models.architecture import Architecture
from meshwright.protocol import RunConfig
from meshwright_worker.data.tokenizer import VOCABULARY
from meshwright_worker.nearest import nearest
from meshwright_worker.validate_replicas import replica_problems

__all__ = ["InvalidRunError", "nearest", "validate"]


class InvalidRunError(ValueError):
    """A run that cannot be executed. The message names each field and the nearest values that work."""


def validate(run: RunConfig) -> tuple[Architecture, DataSpec, TrainingSpec]:
    """The parts of a run of this runtime, after checking that they fit each other.

    Raises:
        InvalidRunError: a part is missing, or degrees, model, batch and data do not fit; lists every problem.
    """
    if run.architecture is None or run.data is None or run.training is None:
        raise InvalidRunError("`model`, `data` and `training` are required unless `runtime.command` is set")
    problems = [
        *_model_problems(run.architecture),
        *_tensor_problems(run, run.architecture, run.training),
        *_pipeline_problems(run, run.architecture),
        *_training_problems(run, run.training),
        *replica_problems(run),
        *_data_problems(run.architecture, run.data),
    ]
    if problems:
        raise InvalidRunError("; ".join(problems))
    return run.architecture, run.data, run.training


def _model_problems(model: Architecture) -> Iterator[str]:
    hidden, heads = model.hidden_size, model.heads
    if hidden % heads or model.head_size % 2:
        fits = nearest(heads, lambda n: hidden % n == 0 and hidden // n % 2 == 0, hidden)
        yield f"`model.heads: {heads}` must divide `model.hiddenSize: {hidden}` into even widths; nearest: {fits}"
    if heads % model.kv_heads:
        fits = nearest(model.kv_heads, lambda n: heads % n == 0, heads)
        yield f"`model.kvHeads: {model.kv_heads}` must divide `model.heads: {heads}`; nearest: {fits}"


def _tensor_problems(run: RunConfig, model: Architecture, training: TrainingSpec) -> Iterator[str]:
    divisible = {
        "model.heads": model.heads,
        "model.kvHeads": model.kv_heads,
        "model.intermediateSize": model.intermediate_size,
        "model.vocabSize": model.vocab_size,
    }
    if run.parallelism.sequence:
        divisible["training.sequenceLength"] = training.sequence_length
    fits = nearest(run.tensor, lambda n: not any(value % n for value in divisible.values()), model.heads)
    for name, value in divisible.items():
        if value % run.tensor:
            yield f"`parallelism.tensor: {run.tensor}` must divide `{name}: {value}`; nearest that fit: {fits}"


def _pipeline_problems(run: RunConfig, model: Architecture) -> Iterator[str]:
    if run.pipeline > model.layers:
        yield f"`parallelism.pipeline: {run.pipeline}` needs a layer a stage; at most `model.layers: {model.layers}`"
    if run.pipeline > 1 and model.tie_embeddings:
        yield "`model.tieEmbeddings: true` needs `parallelism.pipeline: 1`: both ends would own the matrix"
    if run.micro_batches < run.pipeline:
        yield (
            f"`parallelism.microBatches: {run.micro_batches}` must be at least `parallelism.pipeline: {run.pipeline}`: "
            "1F1B needs a micro-batch for every stage"
        )


def _training_problems(run: RunConfig, training: TrainingSpec) -> Iterator[str]:
    parts = run.data_parallel * run.micro_batches
    batch = training.global_batch_size
    if batch % parts:
        fits = nearest(batch, lambda n: n % parts == 0, batch + parts)
        yield (
            f"`training.globalBatchSize: {batch}` must be divisible by `replicas: {run.data_parallel}` times "
            f"`parallelism.microBatches: {run.micro_batches}`; nearest: {fits}"
        )
    optimizer = training.optimizer
    if optimizer.min_learning_rate > optimizer.learning_rate:
        yield (
            f"`training.optimizer.minLearningRate: {optimizer.min_learning_rate}` must not be above "
            f"`training.optimizer.learningRate: {optimizer.learning_rate}`"
        )


def _data_problems(model: Architecture, data: DataSpec) -> Iterator[str]:
    if data.tokenizer is Tokenizer.BYTE and model.vocab_size < VOCABULARY:
        yield f"`model.vocabSize: {model.vocab_size}` must be at least {VOCABULARY} for `data.tokenizer: Byte`"
