"""Text in the run's own tokenizer: whole vocabulary, its end, in one process and split over ranks."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from meshwright.api.data import DataSpec, Tokenizer
from meshwright.api.precision import Precision
from meshwright.data.errors import DataError
from meshwright_worker import export as export_checkpoint
from meshwright_worker.checkpoint.full_tensors import find_checkpoint
from meshwright_worker.checkpoint.loader import find_checkpoint_on_mesh
from meshwright_worker.checkpoint.manifest import MANIFEST, Manifest, encode_manifest
from meshwright_worker.distributed.mesh import join_mesh
from meshwright_worker.generate import continuation, main
from meshwright_worker.inference.checkpoint_tokenizer import tokenizer_for
from meshwright_worker.inference.model import inference_run, load_full_model, load_sharded_model
from meshwright_worker.inference.sampling import sample
from meshwright_worker.rank.task import RankTask
from tests.distributed.cases import train_fully
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool

PROMPT = "the quick brown"
SIZES = {Tokenizer.BPE: 304, Tokenizer.SENTENCE_PIECE: 96}


def write_split(task: RankTask, directory: str) -> str:
    """What a rank of a split model writes, as the command does."""
    checkpoint, manifest = find_checkpoint(Path(directory), verify=False)
    tokenizer = tokenizer_for(manifest, None)
    (prompt,) = tokenizer.encode([PROMPT])
    with join_mesh(task) as mesh:
        checkpoint, manifest = find_checkpoint_on_mesh(Path(directory), mesh)
        model = load_sharded_model(checkpoint, manifest, task.run, mesh, 16)
        written = sample(model, prompt, 12, 0.8, 3, vocabulary=tokenizer.vocabulary, end=tokenizer.separator)
    return PROMPT + continuation(tokenizer, prompt, written)


def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    monkeypatch.setattr(sys, "argv", ["generate", *options])
    main()
    return capsys.readouterr().out


@pytest.fixture(
    scope="module", params=[Tokenizer.BPE, pytest.param(Tokenizer.SENTENCE_PIECE, marks=pytest.mark.long)], ids=str
)
def trained(
    request: pytest.FixtureRequest,
    pool: RankPool,
    text: Path,
    bpe_file: Path,
    sentencepiece_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A checkpoint beside a copy of the volume that it was trained on."""
    root = tmp_path_factory.mktemp("run")
    shutil.copytree(text, root / "volume")
    file = bpe_file if request.param is Tokenizer.BPE else sentencepiece_file
    shutil.copy(file, root / "volume" / "words")
    run = small_run(steps=2, vocab_size=SIZES[request.param])
    data = DataSpec(claim_name="text", pattern="*.py", tokenizer=request.param, tokenizer_file="words")
    pool.run(
        train_fully,
        run.model_copy(update={"data": data}),
        checkpoint_dir=root / "checkpoints",
        data_dir=root / "volume",
    )
    return root


def test_split_models_write_the_text_of_one_process(
    pool: RankPool, trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = str(trained / "checkpoints")
    checkpoint, manifest = find_checkpoint(Path(directory))
    options = ["--checkpoint", directory, "--prompt", PROMPT, "--tokens", "12", "--seed", "3", "--temperature", "0.8"]
    alone = command(capsys, monkeypatch, *options, "--precision", "fp64")
    assert alone.startswith(PROMPT)
    assert len(alone) > len(PROMPT) + 6
    for layout in ({"tensor": 2}, {"pipeline": 2}):
        run = inference_run(manifest, small_run(**layout).layout, Precision.FP64)
        assert pool.run(write_split, run, directory) == [alone[:-1]] * 2

    model = load_full_model(checkpoint, manifest, Precision.FP64, 16)
    tokenizer = tokenizer_for(manifest, None)
    (prompt,) = tokenizer.encode([PROMPT])
    written = sample(model, prompt, 200, 5.0, 1, vocabulary=tokenizer.vocabulary)
    # A model that has hardly learned takes nearly any token, those at the end of the vocabulary too, and none beyond.
    assert tokenizer.vocabulary - 15 < max(written) < tokenizer.vocabulary < manifest.architecture.vocab_size
    model.clear()
    end = written[150]
    until = sample(model, prompt, 200, 5.0, 1, vocabulary=tokenizer.vocabulary, end=end)
    assert until == written[: written.index(end)]


def test_a_tokenizer_is_that_of_the_run(
    trained: Path,
    tmp_path: Path,
    bpe_file: Path,
    sentencepiece_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint, manifest = find_checkpoint(trained / "checkpoints")
    assert manifest.tokenizer is not None
    is_bpe = manifest.tokenizer.kind is Tokenizer.BPE
    own, other = (bpe_file, sentencepiece_file) if is_bpe else (sentencepiece_file, bpe_file)
    assert tokenizer_for(manifest, str(own)).identity == manifest.tokenizer.identity

    moved = manifest.tokenizer.model_copy(update={"file": str(tmp_path / "gone" / "words")})
    elsewhere = manifest.model_copy(update={"tokenizer": moved})
    with pytest.raises(DataError, match=r"gone is not a directory.*pass it with `--tokenizer FILE`"):
        tokenizer_for(elsewhere, None)
    assert tokenizer_for(elsewhere, str(own)).identity == manifest.tokenizer.identity
    with pytest.raises(DataError, match=r"is `byte`, but the checkpoint was trained with"):
        tokenizer_for(manifest, "byte")

    unknown = manifest.model_copy(update={"tokenizer": None})
    with pytest.raises(DataError, match="does not record its tokenizer: .*--tokenizer byte"):
        tokenizer_for(unknown, None)
    assert tokenizer_for(unknown, str(own)).identity == manifest.tokenizer.identity
    if not is_bpe:
        with pytest.raises(DataError, match="has ids up to 299, but the model has rows up to 95"):
            tokenizer_for(unknown, str(other))

    old = tmp_path / "step-00000002"
    shutil.copytree(checkpoint, old)
    raw = Manifest.model_validate_json((old / MANIFEST).read_bytes()).model_copy(update={"tokenizer": None})
    (old / MANIFEST).write_bytes(encode_manifest(raw))
    with pytest.raises(SystemExit):
        command(capsys, monkeypatch, "--checkpoint", str(old))
    assert "does not record its tokenizer" in capsys.readouterr().err
    options = ["--checkpoint", str(old), "--prompt", PROMPT, "--tokens", "3"]
    assert command(capsys, monkeypatch, *options, "--tokenizer", str(own)).startswith(PROMPT)


def test_export_writes_the_tokenizer_of_the_run(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(output: str, *options: str) -> str:
        words = ["export", "--checkpoint", str(trained / "checkpoints"), "--output", str(tmp_path / output), *options]
        monkeypatch.setattr(sys, "argv", words)
        export_checkpoint.main()
        return capsys.readouterr().out

    record = find_checkpoint(trained / "checkpoints")[1].tokenizer
    assert record is not None
    name = "tokenizer.json" if record.kind is Tokenizer.BPE else "tokenizer.model"
    assert export("out").endswith(f"; tokenizer in {name}\n")
    own = trained / "volume" / "words"
    assert (tmp_path / "out" / name).read_bytes() == own.read_bytes()
    moved = own.rename(own.with_name("moved"))
    try:
        assert "without the tokenizer, whose file is not at its old path" in export("without")
        assert "tokenizer in" in export("with", "--tokenizer", str(moved))
        with pytest.raises(SystemExit):
            export("other", "--tokenizer", __file__)
        assert "is not the tokenizer of the run" in capsys.readouterr().err
    finally:
        moved.rename(own)
