"""What a rank refuses by itself, before it meets any other."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.api.data import DataFormat, DataSource, DataSpec
from meshwright.data.errors import DataError
from meshwright.data.files import open_directory
from meshwright.data.shards import MANIFEST
from meshwright.data.tokenize import TextSource, tokenize
from meshwright.data.tokenizers import ByteTokenizer
from meshwright.models.huggingface.reader import architecture_from_config
from meshwright.protocol.messages import FailureKind
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.rank.failures import InvalidRunError, classify, describe
from meshwright_worker.trainer import train as training_loop
from tests.distributed.cases import Recorder
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import tasks_of
from tests.pretrained.published import LLAMA, random_weights, write_model


class MetOthersError(Exception):
    """A process group was to form."""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def joined(task: object) -> None:
        raise MetOthersError

    monkeypatch.setattr(training_loop, "join_mesh", joined)


def refused(run: NativeRun, data_dir: Path, rank: int = 1) -> str:
    """What the rank says of a run that it is not to begin."""
    task = tasks_of(run, None, str(data_dir), port=1)[rank]
    with pytest.raises(Exception) as caught:  # noqa: PT011
        training_loop.train(task, Recorder())
    assert not isinstance(caught.value, MetOthersError), "it was not refused"
    final = isinstance(caught.value, InvalidRunError)
    assert classify(caught.value) is (FailureKind.REJECTED if final else FailureKind.INVALID_INPUT)
    assert classify(caught.value, training=True) is (FailureKind.REJECTED if final else FailureKind.ERROR)
    return describe(caught.value)


def accepted(run: NativeRun, data_dir: Path, rank: int = 1) -> None:
    with pytest.raises(MetOthersError):
        training_loop.train(tasks_of(run, None, str(data_dir), port=1)[rank], Recorder())


def with_data(run: NativeRun, **fields: Any) -> NativeRun:
    spec = DataSpec(**{"source": DataSource.FILES, "claim_name": "v", "pattern": "**/*.py", **fields})
    return run.model_copy(update={"data": spec})


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    root = tmp_path / "volume"
    for name in ("code", "web"):
        (root / name).mkdir(parents=True)
        (root / name / "a.py").write_text("def one():\n    return 1\n" * 8)
    (root / "empty.txt").touch()
    return root


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"pattern": "**/*.cc"}, ["`data.pattern: **/*.cc` matches no file", "code/a.py, web/a.py"]),
        ({"pattern": "*.txt"}, ["`data.pattern: *.txt` matches only empty files", "code/a.py"]),
        ({"mixture": [{"path": "code"}, {"path": "wbe"}]}, ["`data.mixture` with `path: wbe`", "there: code, web"]),
        ({"held_out": 0.00001}, ["`data.heldOut: 1e-05` holds out no document", "a larger share"]),
        ({"format": DataFormat.TOKENS}, ["`data.format: Tokens`", "`meshwright data tokenize` wrote"]),
        ({"format": DataFormat.JSON_LINES}, ["code/a.py:1: not JSON"]),
        ({"format": DataFormat.PROMPT_COMPLETION}, ["code/a.py:1: not JSON"]),
        (
            {"tokenizer": "BPE", "tokenizer_file": "no.json", "format": DataFormat.TEXT},
            ["`data.tokenizerFile`", "cannot be read"],
        ),
        (
            {"tokenizer": "BPE", "tokenizer_file": "code/a.py", "format": DataFormat.TEXT},
            ["`data.tokenizerFile: code/a.py`", "is not a valid tokenizer.json"],
        ),
    ],
    ids=str,
)
def test_data_that_will_not_do(volume: Path, fields: dict[str, Any], says: list[str]) -> None:
    said = refused(with_data(small_run(data=2, length=16), **fields), volume)
    assert all(part in said for part in says), said


def test_valid_data_is_accepted(volume: Path) -> None:
    accepted(with_data(small_run(data=2)), volume)


def test_a_volume_that_is_not_there(volume: Path) -> None:
    said = refused(small_run(data=2), volume.parent / "other")
    assert "`data.claimName`" in said
    assert "directories there: volume" in said


def test_a_text_too_short_names_the_longest_sequence(volume: Path) -> None:
    assert "`training.sequenceLength` may be at most 385" in refused(small_run(data=2, length=1024), volume)


def test_held_out_documents_too_short_for_a_sample_are_not_taken_for_the_text(volume: Path) -> None:
    (volume / "web" / "b.py").write_text("pass\n")
    run = with_data(small_run(data=2, training={"evaluation": {"every_steps": 2}}), held_out=0.02)
    said = refused(run, volume)
    assert "`data.heldOut: 0.02` holds out 6 tokens, too few for one sample to evaluate on: use a larger share" in said
    assert "`training.sequenceLength` of at most 5" in said


def test_an_island_without_a_folder_of_its_own(volume: Path) -> None:
    (volume / "code").rename(volume / "island-0")
    run = small_run(data=2, outer={"method": "FedAvg", "every_steps": 1})
    accepted(run, volume, rank=0)
    said = refused(run, volume, rank=1)
    assert "island-1 is not a directory" in said
    assert "directories there: island-0, web" in said


def test_a_vocabulary_larger_than_the_models(volume: Path, bpe_file: Path) -> None:
    (volume / "tokenizer.json").write_bytes(bpe_file.read_bytes())
    fields = {"tokenizer": "BPE", "tokenizer_file": "tokenizer.json"}
    said = refused(with_data(small_run(data=2, vocab_size=40), **fields), volume)
    assert "`model.vocabSize: 40` must be at least" in said


def tokens_of(volume: Path) -> Path:
    target = volume.parent / "tokens"
    tokenize(TextSource(open_directory(str(volume)), "**/*.py"), ByteTokenizer(), target)
    return target


def test_tokens_in_a_subdirectory_are_pointed_out(volume: Path) -> None:
    root = tokens_of(volume).parent
    said = refused(with_data(small_run(data=2), format=DataFormat.TOKENS), root)
    assert "`data.format: Tokens`: no meshwright-tokens.json" in said
    assert "there are tokens in tokens: set `data.mixture: [{path: tokens, weight: 1}]`" in said
    accepted(with_data(small_run(data=2), format=DataFormat.TOKENS, mixture=[{"path": "tokens", "weight": 1}]), root)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_storage_that_does_not_answer_is_tried_again(
    volume: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A mount without its server is no mistake of the user: the start fails, and counts as a failure of the ranks."""
    stat = Path.stat

    def away(path: Path, **options: Any) -> Any:
        if path == volume:
            raise OSError(number, os.strerror(number), str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", away)
    with pytest.raises(DataError) as caught:
        training_loop.train(tasks_of(with_data(small_run(data=2)), None, str(volume), port=1)[1], Recorder())
    assert os.strerror(number) in str(caught.value)
    assert classify(caught.value) is FailureKind.ERROR


def test_a_bucket_that_does_not_answer_is_tried_again_and_one_that_does_not_exist_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshwright.data.remote_reads.PATIENCE_SECONDS", 0.0)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}/texts"
    with pytest.raises(DataError) as caught:
        open_directory(address).open("tokenizer.json")
    assert classify(caught.value) is FailureKind.ERROR
    for uri in ("nosuchscheme://bucket/texts", "memory://nothing-here"):
        with pytest.raises(DataError) as caught:
            list(open_directory(uri).open("tokenizer.json"))
        assert classify(caught.value) is FailureKind.INVALID_INPUT, uri


def cut(tokens: Path) -> None:
    shard = tokens / "00000.tokens"
    shard.write_bytes(shard.read_bytes()[:-2])


def spoil(tokens: Path) -> None:
    (tokens / MANIFEST).write_text("{")


def forget(tokens: Path) -> None:
    (tokens / "00000.tokens").unlink()


@pytest.mark.parametrize(
    ("damage", "says"),
    [(cut, "copy the directory again"), (spoil, f"{MANIFEST} is damaged"), (forget, "00000.tokens has no bytes")],
)
def test_a_corrupt_shard(volume: Path, damage: Callable[[Path], None], says: str) -> None:
    tokens, run = tokens_of(volume), with_data(small_run(data=2), format=DataFormat.TOKENS)
    accepted(run, tokens)
    damage(tokens)
    said = refused(run, tokens)
    assert "`data.format: Tokens`" in said
    assert says in said


def test_a_flipped_bit_in_held_out_documents(volume: Path) -> None:
    tokens = tokens_of(volume)
    evaluated = {"evaluation": {"every_steps": 1, "samples": 1}}
    run = with_data(small_run(data=2, training=evaluated), format=DataFormat.TOKENS, held_out=0.5)
    accepted(run, tokens)
    shard = bytearray((tokens / "00000.tokens").read_bytes())
    shard[100] ^= 1
    (tokens / "00000.tokens").write_bytes(shard)
    assert "00000.tokens is damaged: wrong checksum of bytes 0 to 771" in refused(run, tokens)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", LLAMA, random_weights(LLAMA), files=2)


def from_weights(directory: Path, **config: Any) -> NativeRun:
    run = small_run(data=2, training={"initial_weights": str(directory)})
    return run.model_copy(update={"architecture": architecture_from_config({**LLAMA, **config})})


def test_weights_to_begin_from(volume: Path, published: Path) -> None:
    accepted(from_weights(published), volume)
    assert "`training.initialWeights" in refused(from_weights(published.parent / "nothing"), volume)
    assert "contains another model: `layers` 3 there, 2 in `model`" in refused(
        from_weights(published, num_hidden_layers=2), volume
    )
    assert "contains another model: `normEpsilon` 1e-05 there, 1e-06 in `model`: change `model`" in refused(
        from_weights(published, rms_norm_eps=1e-6), volume
    )


def drop_file(directory: Path) -> str:
    (directory / "model-00002-of-00002.safetensors").unlink()
    return "model-00002-of-00002.safetensors cannot be read"


def cut_file(directory: Path) -> str:
    file = directory / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    return "is shorter than its header says"


def drop_tensor(directory: Path) -> str:
    index = directory / "model.safetensors.index.json"
    there = json.loads(index.read_text())
    gone = "model-00001-of-00002.safetensors"
    there["weight_map"] = {name: file for name, file in there["weight_map"].items() if file != gone}
    index.write_text(json.dumps(there))
    return "has no tensor"


@pytest.mark.parametrize("damage", [drop_file, cut_file, drop_tensor])
def test_weights_that_are_incomplete(volume: Path, published: Path, damage: Callable[[Path], str]) -> None:
    says = damage(published)
    said = refused(from_weights(published), volume)
    assert "`training.initialWeights: " in said
    assert says in said


def test_a_tensor_of_another_shape(volume: Path, tmp_path: Path) -> None:
    weights = random_weights(LLAMA)
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"][:, :-1].contiguous()
    said = refused(from_weights(write_model(tmp_path / "model", LLAMA, weights)), volume)
    assert "`layers.1.mlp.up_proj.weight` is [48, 31], not a parameter of [48, 32]" in said
