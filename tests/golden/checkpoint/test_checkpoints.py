"""Checkpoints and exported models hold what was recorded: names, types, shapes, boxes, files, metadata."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshwright_worker.checkpoint.full_tensors import find_checkpoint
from meshwright_worker.pretrained.hf_export import export
from tests.distributed.rank_pool import RankPool
from tests.golden.checkpoint.cases import CASES, FAMILIES, Case, train
from tests.golden.checkpoint.structure import exported, structure
from tests.golden.files import check
from tests.pretrained.published import LLAMA, random_weights, write_model
from tests.tiers import mostly_long


@pytest.mark.parametrize("case", mostly_long(CASES, lambda case: case.quick), ids=lambda case: case.name)
def test_a_checkpoint_holds_what_was_recorded(pool: RankPool, tmp_path: Path, corpus: Path, case: Case) -> None:
    root = tmp_path / "checkpoints"
    train(case, pool, root, corpus)
    check(f"checkpoint/runs/{case.name}.jsonl", structure(root))
    if case in FAMILIES:
        export_to(tmp_path / "out", root)
        check(f"checkpoint/exports/{case.name}.jsonl", exported(tmp_path / "out"))


def export_to(output: Path, root: Path, *, file_bytes: int = 1 << 30) -> None:
    checkpoint, manifest = find_checkpoint(root)
    export(checkpoint, manifest, output, dtype=torch.bfloat16, file_bytes=file_bytes)


@pytest.mark.long
def test_a_model_in_several_files_has_the_recorded_index(pool: RankPool, tmp_path: Path, corpus: Path) -> None:
    (case,) = (case for case in FAMILIES if case.name == "deepseek-v3")
    train(case, pool, tmp_path / "checkpoints", corpus)
    export_to(tmp_path / "out", tmp_path / "checkpoints", file_bytes=20_000)
    check("checkpoint/exports/in-several-files.jsonl", exported(tmp_path / "out"))


@pytest.mark.long
def test_only_adapters_are_saved_and_they_are_exported_merged(pool: RankPool, tmp_path: Path, corpus: Path) -> None:
    config = {**LLAMA, "num_hidden_layers": 1}
    model = write_model(tmp_path / "model", config, random_weights(config))
    training = {"initial_weights": str(model), "lora": {"rank": 3, "targets": ["Query", "Down"]}}
    train(Case("adapters", {"training": training}, config=config), pool, tmp_path / "checkpoints", corpus)
    found = structure(tmp_path / "checkpoints")
    assert found["manifest"].pop("initialWeights") == str(model)
    # The random numbers of another processor have other last bits.
    assert found["manifest"].pop("baseFingerprint").startswith("1-")
    check("checkpoint/runs/adapters.jsonl", found)
    export_to(tmp_path / "out", tmp_path / "checkpoints")
    check("checkpoint/exports/adapters.jsonl", exported(tmp_path / "out"))
