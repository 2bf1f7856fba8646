"""Padding that is cut changes losses and gradients by rounding alone, and is neither computed nor counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from meshwright.api.data import DataFormat, DataSpec, Packing
from meshwright.api.parallelism import ContextMethod
from meshwright.api.precision import Precision
from meshwright.data.tokenizers import BYTE_SEPARATOR
from meshwright.models.counts import training_flops
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.data.batch import make_batch
from meshwright_worker.data.mixture import open_stream
from meshwright_worker.distributed.mesh import join_mesh
from meshwright_worker.rank.task import RankTask, StepReport
from meshwright_worker.trainer.train import build_trainer
from tests.distributed.cases import train_fully, whole_of
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool
from tests.tiers import mostly_long

LENGTH, BATCH, STEPS = 16, 8, 2
LENGTHS = [[3, 9, 5, 4, 2, 7, 4, 6], [16, 3, 4, 4, 5, 2, 6, 3]]
"""Of the rows of each step, as many as are not padding."""


def padded_samples(step: int, vocabulary: int) -> torch.Tensor:
    """Rows of a prompt of one or two tokens, a completion and padding, as `InstructionStream` gives them."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.full((BATCH, LENGTH + 1), ~BYTE_SEPARATOR)
    for row, length in zip(rows, LENGTHS[step - 1], strict=True):
        tokens = torch.randint(0, min(vocabulary, BYTE_SEPARATOR), (length + 1,), generator=generator)
        prompt = 1 + length % 2
        row[: length + 1] = torch.cat((~tokens[:prompt], tokens[prompt:]))
    return rows


@dataclass
class Seen:
    losses: list[float]
    token_counts: list[tuple[int, int] | None]
    evaluated: float
    operations: int
    gradients: dict[str, torch.Tensor]


def train_on_padded_rows(task: RankTask) -> Seen:
    model, data = task.run.architecture, task.run.data
    with join_mesh(task) as mesh:
        trainer = build_trainer(task.run, mesh)
        gradients: dict[str, torch.Tensor] = {}
        update = trainer.optimizer.step

        def caught(given: Sequence[torch.Tensor], rate: float) -> None:
            if not gradients:
                for shard, local in zip(trainer.shards, given, strict=True):
                    gradients[shard.name] = whole_of(shard, local)
            update(given, rate)

        trainer.optimizer.step = caught  # type: ignore[method-assign]
        share = BATCH // mesh.layout.data
        first = mesh.coordinates.data * share
        results = []
        with FlopCounterMode(display=False) as counter:
            for number in range(1, STEPS + 1):
                numbers = range((number - 1) * BATCH + first, (number - 1) * BATCH + first + share)
                samples = padded_samples(number, model.vocab_size)[first : first + share]
                batch = make_batch(samples, data, BYTE_SEPARATOR, numbers)
                results.append(trainer.step(number, batch))
            results += trainer.drain()
        told = [result for result in results if result is not None]
        evaluated = trainer.evaluate([batch])
        return Seen(
            [r.loss for r in told], [r.token_counts for r in told], evaluated, counter.get_total_flops(), gradients
        )


LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "dropout": {"training": {"dropout": 0.2, "attention_dropout": 0.2}},
    "loss in chunks": {"tensor": 2, "training": {"loss_chunk_tokens": 8}},
    "tensor": {"tensor": 2},
    "1F1B": {"pipeline": 2, "micro_batches": 4},
    "1F1B, selective checkpointing": {
        "pipeline": 2,
        "micro_batches": 4,
        "training": {"activation_checkpointing": "Selective"},
    },
    "ZB-V": {"pipeline": 2, "micro_batches": 4, "layers": 4, "parallelism": {"schedule": "ZBV"}},
    "PipeDream-2BW": {"pipeline": 2, "clip": 0.0, "parallelism": {"schedule": "PipeDream2BW"}},
    "ring": {"context": 2},
    "all-gather, documents apart": {
        "context": 2,
        "method": ContextMethod.ALL_GATHER,
        "packing": Packing.DOCUMENTS,
    },
    "replicas": {"data": 2},
    "ZeRO-3": {"data": 2, "zero": 3},
    "three dimensions": {"tensor": 2, "pipeline": 2, "context": 2},
}
SHORT = ("one process", "PipeDream-2BW")


def formed(run: NativeRun, form: DataFormat) -> NativeRun:
    return run.model_copy(update={"data": run.data.model_copy(update={"format": form})})


@pytest.mark.parametrize("name", mostly_long(LAYOUTS, lambda name: name in SHORT))
def test_losses_and_gradients_are_the_same_with_less_to_do(pool: RankPool, name: str) -> None:
    run = small_run(**{"precision": Precision.FP64, "steps": STEPS, "length": LENGTH, "batch": BATCH, **LAYOUTS[name]})
    # The same rows, but not known to be padded.
    whole = pool.run(train_on_padded_rows, formed(run, DataFormat.TEXT))
    cut = pool.run(train_on_padded_rows, formed(run, DataFormat.PROMPT_COMPLETION))
    tokens = [(sum(rows), sum(row * row for row in rows)) for rows in LENGTHS]
    for one, other in zip(whole, cut, strict=True):
        assert len(one.losses) == STEPS
        assert other.losses == pytest.approx(one.losses, rel=1e-12)
        assert other.evaluated == pytest.approx(one.evaluated, rel=1e-12)
        assert one.gradients.keys() == other.gradients.keys()
        for parameter, want in one.gradients.items():
            assert float((other.gradients[parameter] - want).abs().max() / want.abs().max()) <= 1e-12, parameter
        assert one.token_counts == [None] * STEPS
        assert other.token_counts == tokens
    assert sum(rank.operations for rank in cut) < 0.8 * sum(rank.operations for rank in whole)


@pytest.mark.parametrize(
    "layout", [{"data": 2}, {"pipeline": 2, "clip": 0.0, "parallelism": {"schedule": "PipeDream"}}]
)
def test_throughput_counts_no_padding(pool: RankPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    records = [{"prompt": "?" * (1 + number % 3), "completion": "ok" * (number % 5 + 1)} for number in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    data = DataSpec(claim_name="v", pattern="*.jsonl", format=DataFormat.PROMPT_COMPLETION)
    run = small_run(**{"micro_batches": 1, **layout}, steps=3, length=LENGTH, batch=BATCH)
    run = run.model_copy(update={"data": data})
    stream = open_stream(data, str(tmp_path), LENGTH, 0)
    for _, recorder in pool.run(train_fully, run, data_dir=tmp_path):
        reports: list[StepReport] = recorder.reports
        assert [report.step for report in reports] == [1, 2, 3]
        for report in reports:
            rows = stream.batch((report.step - 1) * BATCH, BATCH)
            # The last token is only predicted.
            lengths = [int((row >= 0).nonzero().max()) for row in rows]
            assert report.tokens == sum(lengths)
            want = sum(length * training_flops(run.architecture, length) for length in lengths)
            assert report.model_flops == pytest.approx(want, rel=1e-2)
