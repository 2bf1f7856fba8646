"""What the runtime refuses, and the way out that it names."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.api.parallelism import ParallelismSpec
from meshwright.api.training import OptimizerSpec, TrainingSpec
from meshwright.models.architecture import Architecture
from meshwright.protocol.run_config import NativeRun
from meshwright.rules.nearest import nearest
from meshwright_worker.rank.failures import InvalidRunError
from meshwright_worker.trainer.train import validate_run
from tests.runs import native_run

MODEL = {
    "layers": 4,
    "hidden_size": 64,
    "intermediate_size": 192,
    "heads": 8,
    "kv_heads": 4,
    "vocab_size": 320,
}


def run_of(
    degrees: tuple[int, int, int] = (2, 2, 2),
    micro_batches: int = 4,
    sequence: bool = True,
    batch: int = 16,
    length: int = 32,
    optimizer: OptimizerSpec | None = None,
    **model: Any,
) -> NativeRun:
    return native_run(
        Architecture(**{**MODEL, **model}),
        TrainingSpec(steps=10, global_batch_size=batch, sequence_length=length, optimizer=optimizer or OptimizerSpec()),
        degrees,
        micro_batches=micro_batches,
        parallelism=ParallelismSpec(sequence=sequence),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"degrees": (4, 1, 1), "micro_batches": 1},
        {"degrees": (1, 4, 1)},
        {"degrees": (1, 1, 1), "tie_embeddings": True},
        {"length": 33, "sequence": False},
        {"degrees": (1, 3, 1)},
    ],
)
def test_what_fits(changes: dict[str, Any]) -> None:
    validate_run(run_of(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 7}, r"`model.hiddenSize: 64` must be a multiple of twice `model.heads: 7`"),
        ({"heads": 64, "kv_heads": 4}, r"`model.hiddenSize: 64` .*`model.heads: 64`.* even number.*; nearest: 128"),
        ({"kv_heads": 3}, r"`model.kvHeads: 3` must divide `model.heads: 8`.*; nearest: 2, 4"),
        ({"degrees": (3, 1, 1)}, r"`parallelism.tensor: 3` must divide `model.heads: 8`.*; nearest: 2, 4"),
        ({"degrees": (8, 1, 1)}, r"`parallelism.tensor: 8` must divide `model.kvHeads: 4`.*; nearest: 4"),
        ({"vocab_size": 321}, r"must divide `model.vocabSize: 321`.*; nearest: 1"),
        ({"intermediate_size": 191}, r"must divide `model.intermediateSize: 191`"),
        ({"length": 33}, r"must divide `training.sequenceLength: 33`"),
        ({"degrees": (1, 5, 1), "micro_batches": 8}, r"`parallelism.pipeline: 5` .* must be at most `model.layers: 4`"),
        ({"micro_batches": 1}, r"`parallelism.microBatches: 1` must be at least `parallelism.pipeline: 2`"),
        (
            {"batch": 20},
            r"`parallelism.microBatches: 4` .* `training.globalBatchSize: 20`.*; nearest: 2, 5",
        ),
        ({"batch": 4}, r"`replicas: 2` must divide `training.globalBatchSize: 4`.*; nearest: 2"),
        (
            {"vocab_size": 256},
            r"`model.vocabSize: 256` must be at least 257 with `data.tokenizer: Byte`.*; nearest: 258",
        ),
        (
            {"optimizer": OptimizerSpec(learning_rate=0.1, min_learning_rate=0.2)},
            r"`training.optimizer.minLearning",
        ),
    ],
)
def test_what_does_not_fit_names_field_and_fix(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRunError, match=message):
        validate_run(run_of(**changes))


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(InvalidRunError) as error:
        validate_run(run_of(batch=21, vocab_size=256, micro_batches=1))
    assert str(error.value).count(";") >= 2


@pytest.mark.parametrize(
    ("value", "limit", "text"), [(5, 12, "4, 6"), (1, 12, "1, 2"), (12, 12, "12"), (20, 12, "12"), (7, 7, "6")]
)
def test_nearest(value: int, limit: int, text: str) -> None:
    assert nearest(value, lambda n: 12 % n == 0, limit) == text
