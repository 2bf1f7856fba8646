"""Adapters over other weights than those that they were trained on: no run continues, nothing is exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.models.huggingface.reader import architecture_from_config
from meshwright.protocol.messages import FailureKind
from meshwright_worker import export as export_program
from meshwright_worker import generate as generate_program
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.full_tensors import find_checkpoint
from meshwright_worker.checkpoint.manifest import MANIFEST, encode_manifest, read_manifest
from meshwright_worker.pretrained.base_fingerprint import base_fingerprint
from meshwright_worker.rank.failures import classify, describe
from meshwright_worker.rank.task import Outcome, RankTask
from tests.distributed.cases import train_fully
from tests.distributed.configs import small_run
from tests.distributed.memory_gang import gang_of
from tests.distributed.rank_pool import Last, RankPool
from tests.distributed.test_pretrained import LORA, published_run
from tests.pretrained.published import LLAMA, random_weights, write_model

LAYOUTS: list[dict[str, Any]] = [{"tensor": 2, "pipeline": 2}, {"data": 2, "zero": 3}]


def fingerprint(directory: Path) -> str:
    return base_fingerprint(architecture_from_config(LLAMA), directory)


def refused(task: RankTask) -> Last:
    """How a rank fails, and with what message."""
    try:
        return Last(train_fully(task))
    except BaseException as error:
        return Last((classify(error), describe(error)))


def put(model: Path, seed: int) -> str:
    """Other weights of the same model at the same place; their fingerprint."""
    for file in model.glob("*") if model.is_dir() else ():
        file.unlink()
    if model.is_dir():
        model.rmdir()
    return fingerprint(write_model(model, LLAMA, random_weights(LLAMA, seed)))


def edit_manifest(checkpoints: Path, step: int, **changes: Any) -> None:
    path = CheckpointDirectory(checkpoints).path(step)
    (path / MANIFEST).write_bytes(encode_manifest(read_manifest(path).model_copy(update=changes)))


def test_a_run_does_not_continue_over_other_weights(pool: RankPool, tmp_path: Path, text: Path) -> None:
    model, checkpoints = tmp_path / "model", tmp_path / "checkpoints"
    first = put(model, 0)
    before, after = (published_run(LLAMA, model, layout, lora=LORA) for layout in LAYOUTS)
    for outcome, _ in pool.run(train_fully, before, 0, 4, checkpoint_dir=checkpoints, data_dir=text):
        assert outcome is Outcome.STOPPED
    assert find_checkpoint(checkpoints)[1].base_fingerprint == first
    second = put(model, 1)
    for answer in pool.run(refused, after, checkpoint_dir=checkpoints, data_dir=text):
        kind, message = answer.value
        assert kind is FailureKind.CHECKPOINT_INCOMPATIBLE
        assert message == (
            f"the checkpoint's adapters were trained on other weights (fingerprint {first}) than those in "
            f"`training.initialWeights: {model}` now ({second}): restore the original files there, or use an empty "
            "`checkpoint.claimName`"
        )
    assert CheckpointDirectory(checkpoints).steps()[0] == 4, "the checkpoint stays"
    # One of a version that recorded nothing continues, and its next checkpoint says over which weights.
    for step in CheckpointDirectory(checkpoints).steps():
        edit_manifest(checkpoints, step, base_fingerprint=None)
    assert "baseFingerprint" not in json.loads((CheckpointDirectory(checkpoints).path(4) / MANIFEST).read_text())
    for outcome, recorder in pool.run(train_fully, after, checkpoint_dir=checkpoints, data_dir=text):
        assert (outcome, recorder.began_at) == (Outcome.COMPLETE, 4)
    assert find_checkpoint(checkpoints)[1].base_fingerprint == second


def test_nothing_is_exported_or_generated_over_other_weights(
    pool: RankPool, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, other, checkpoints = tmp_path / "model", tmp_path / "other", tmp_path / "checkpoints"
    first, second = put(model, 0), put(other, 1)
    pool.run(
        train_fully, published_run(LLAMA, model, {}, lora=LORA, steps=2), checkpoint_dir=checkpoints, data_dir=text
    )

    def run(program: Any, *words: str) -> str:
        monkeypatch.setattr("sys.argv", ["program", "--checkpoint", str(checkpoints), *words])
        program.main()
        return capsys.readouterr().out

    programs = (
        (export_program, ["--output", str(tmp_path / "merged")]),
        (export_program, ["--output", str(tmp_path / "adapter"), "--adapter"]),
        (generate_program, ["--prompt", "a", "--tokens", "2", "--cpu"]),
    )
    moved = model.rename(tmp_path / "moved")
    for program, words in programs:
        with pytest.raises(SystemExit):
            run(program, *words, "--base", str(other))
        assert (
            f"{other} has other weights (fingerprint {second}) than the model that the adapters were trained on "
            f"({first}, then at {model}): pass the directory of that model with `--base`"
        ) in capsys.readouterr().err
        assert not (tmp_path / "merged").exists()
        assert not (tmp_path / "adapter").exists()
    for program, words in programs:
        assert run(program, *words, "--base", str(moved))
    # Somebody has put other weights at the old path.
    put(model, 1)
    with pytest.raises(SystemExit):
        run(generate_program, "--prompt", "a")
    assert f"{model} has other weights" in capsys.readouterr().err


def test_adapters_of_random_weights_have_no_base(
    pool: RankPool, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = published_run(LLAMA, tmp_path, {}, lora=LORA, steps=2)
    random = run.model_copy(update={"training": run.training.model_copy(update={"initial_weights": None})})
    pool.run(train_fully, random, checkpoint_dir=tmp_path / "checkpoints", data_dir=text)
    assert find_checkpoint(tmp_path / "checkpoints")[1].base_fingerprint is None
    put(tmp_path / "other", 1)
    words = ["program", "--checkpoint", str(tmp_path / "checkpoints"), "--base", str(tmp_path / "other")]
    for program, more in ((export_program, ["--output", str(tmp_path / "out")]), (generate_program, [])):
        monkeypatch.setattr("sys.argv", [*words, *more])
        with pytest.raises(SystemExit):
            program.main()
        assert "--base: the adapters belong to random weights" in capsys.readouterr().err


@pytest.mark.long  # random weights below are recovered in the same way
@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
async def test_ranks_that_continue_from_memory_record_the_weights_that_they_hold(
    tmp_path: Path, text: Path, zero: int
) -> None:
    """Rank 0 is lost after the files were replaced: the frozen weights come from the others, and so does the record."""
    model = tmp_path / "model"
    first = put(model, 0)
    layout = {"data": 4, "zero": zero, "replicas": {"shard_size": 2}} if zero else {"data": 2}
    run = published_run(LLAMA, model, layout, lora=LORA, steps=6)
    async with gang_of(run, tmp_path / "checkpoints", text) as gang:
        await gang.start(fatal={0: "5:backward:1"})
        await gang.trains()
        second = put(model, 1)
        await gang.recover()
        await gang.finish()
    assert gang.memories, "the ranks continued from memory"
    checkpoint = CheckpointDirectory(tmp_path / "checkpoints").path(6)
    assert read_manifest(checkpoint).base_fingerprint == first != second


@pytest.mark.long  # test_memory_recovery.py: what memory holds; the record in checkpoints is tested above
@pytest.mark.slow
async def test_ranks_that_continue_from_memory_record_how_random_weights_were_drawn(
    pool: RankPool, tmp_path: Path, text: Path
) -> None:
    """Version 0.1.0 drew them in another way, and so does a run that began with it."""
    checkpoints = tmp_path / "checkpoints"
    pool.run(
        train_fully, small_run(data=2, steps=2, training={"lora": LORA}), checkpoint_dir=checkpoints, data_dir=text
    )
    for step in CheckpointDirectory(checkpoints).steps():
        edit_manifest(checkpoints, step, weights_in_tiles=False)
    async with gang_of(small_run(data=2, steps=6, training={"lora": LORA}), checkpoints, text) as gang:
        await gang.start(fatal={0: "5:backward:1"})
        await gang.trains()
        await gang.recover()
        await gang.finish()
    assert gang.memories, "the ranks continued from memory"
    assert read_manifest(CheckpointDirectory(checkpoints).path(6)).weights_in_tiles is False


def test_a_checkpoint_of_the_whole_model_has_no_base(pool: RankPool, tmp_path: Path, text: Path) -> None:
    model = tmp_path / "model"
    put(model, 0)
    pool.run(train_fully, published_run(LLAMA, model, {}, steps=2), checkpoint_dir=tmp_path / "c", data_dir=text)
    assert find_checkpoint(tmp_path / "c")[1].base_fingerprint is None
