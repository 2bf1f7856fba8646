"""Supervised fine-tuning from end to end: published weights, prompts with completions, a resume, an export."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from meshwright.api.data import DataFormat, DataSource, DataSpec
from meshwright.models.huggingface.reader import architecture_from_config
from meshwright.protocol.run_config import NativeRun
from meshwright_worker import generate
from meshwright_worker.checkpoint.full_tensors import find_checkpoint
from meshwright_worker.data.batch import IGNORED, Batch
from meshwright_worker.data.mixture import open_stream
from meshwright_worker.pretrained.hf_export import export
from meshwright_worker.pretrained.tensor_files import TensorFiles
from meshwright_worker.rank.task import Outcome
from tests.distributed.cases import Recorder, train_fully
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool
from tests.pretrained import reference
from tests.pretrained.published import LLAMA, random_weights, write_model
from tests.tiers import mostly_long

LENGTH, STEPS, BATCH = 16, 12, 8
# Answers of different lengths: ranks and micro-batches predict different numbers of tokens.
RECORDS = [{"prompt": f"{number} times?", "completion": "ok" * (number % 4 + 1)} for number in range(20)]
DATA = DataSpec(source=DataSource.FILES, claim_name="v", pattern="*.jsonl", format=DataFormat.PROMPT_COMPLETION)
LORA = {"rank": 4, "alpha": 16.0, "targets": ["Query", "Value", "Up", "Down"]}
# Adapters are read into every layout alike; without them ZeRO-3 shards what is trained.
LAYOUTS: list[dict[str, Any]] = [{"tensor": 2}, {"data": 2, "zero": 3}]


def run_of(model: Path, layout: dict[str, Any], lora: dict[str, Any] | None) -> NativeRun:
    optimizer = {"learning_rate": 3e-2 if lora else 3e-3}
    training = {"initial_weights": str(model), "lora": lora}
    run = small_run(
        **layout, length=LENGTH, batch=BATCH, steps=STEPS, every=4, keep=3, training=training, optimizer=optimizer
    )
    return run.model_copy(update={"data": DATA, "architecture": architecture_from_config(LLAMA)})


def losses(recorder: Recorder) -> list[float]:
    return [report.loss for report in recorder.reports]


def loss_on_completions(directory: Path, data: Path, first: int) -> float:
    """Of a published model, by a forward pass written apart, on the samples of a step."""
    batch = Batch.of(open_stream(DATA, str(data), LENGTH, 0).batch(first, BATCH))
    files = TensorFiles(directory)
    # The names in the files have a prefix that `TensorFiles` takes off.
    tensors = {name: files.find(name).map().double() for name in files.names}
    logits = reference.llama(tensors, LLAMA, batch.tokens)
    assert (batch.targets == IGNORED).any()
    return float(F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED))


def exported(checkpoints: Path, output: Path) -> Path:
    checkpoint, manifest = find_checkpoint(checkpoints)
    assert manifest.state.step == STEPS
    export(checkpoint, manifest, output, dtype=torch.float32, file_bytes=1 << 30)
    return output


@pytest.mark.parametrize("lora", mostly_long([None, LORA], bool), ids=["full", "lora"])
def test_a_job_fine_tunes_resumes_and_exports(
    pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: dict[str, Any] | None
) -> None:
    model = write_model(tmp_path / "model", LLAMA, random_weights(LLAMA), files=2)
    data, saved = tmp_path / "data", tmp_path / "checkpoints"
    data.mkdir()
    (data / "a.jsonl").write_text("\n".join(json.dumps(record) for record in RECORDS))
    ((outcome, alone),) = pool.run(
        train_fully, run_of(model, {}, lora), checkpoint_dir=tmp_path / "alone", data_dir=data
    )
    assert outcome is Outcome.COMPLETE
    want = losses(alone)
    assert want[0] == pytest.approx(loss_on_completions(model, data, 0), rel=1e-5)
    assert want[-1] < 0.7 * want[0]

    before, after = LAYOUTS
    for outcome, recorder in pool.run(
        train_fully, run_of(model, before, lora), 0, 6, checkpoint_dir=saved, data_dir=data
    ):
        assert outcome is Outcome.STOPPED
        assert losses(recorder) == pytest.approx(want[:6], rel=1e-4)
    for outcome, recorder in pool.run(train_fully, run_of(model, after, lora), checkpoint_dir=saved, data_dir=data):
        assert outcome is Outcome.COMPLETE
        assert recorder.began_at == 6
        assert losses(recorder) == pytest.approx(want[6:], rel=1e-4)

    learned = loss_on_completions(exported(saved, tmp_path / "out"), data, STEPS * BATCH)
    assert learned == pytest.approx(
        loss_on_completions(exported(tmp_path / "alone", tmp_path / "out-alone"), data, STEPS * BATCH), rel=1e-4
    )
    assert learned < 0.7 * loss_on_completions(model, data, STEPS * BATCH)
    if lora is not None:
        generates_with_a_base_that_has_moved(saved, model, monkeypatch)


def generates_with_a_base_that_has_moved(saved: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside the pod, the base model is rarely at the path that the job had it at."""
    moved = model.rename(model.with_name("moved"))
    words = ["generate", "--checkpoint", str(saved), "--prompt", "a", "--tokens", "3", "--cpu", "--temperature", "0"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        generate.main()
    monkeypatch.setattr(sys, "argv", [*words, "--base", str(moved)])
    generate.main()
