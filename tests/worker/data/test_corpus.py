"""What `spec.data` opens on a worker: records, tokens, other tokenizers, mixtures."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
import torch
from pyarrow import parquet

from meshwright.api.data import DataFormat, DataSpec, MixturePart, OnCorrupt, Tokenizer
from meshwright.data.errors import CorruptRecordError, DataError, is_storage_fault
from meshwright.data.files import LocalDirectory, open_directory
from meshwright.data.tokenize import TextSource, tokenize
from meshwright.data.tokenizers import BYTE_SEPARATOR, ByteTokenizer
from meshwright_worker.data.mixture import MixtureStream, open_stream
from meshwright_worker.data.open_corpus import open_corpus
from meshwright_worker.data.sample_order import SampleStream
from meshwright_worker.data.token_cache import ENV_CACHE_DIR, open_tokenizer_at

TEXTS = [f"document number {number} " * 3 for number in range(12)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(ENV_CACHE_DIR, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    root = tmp_path / "volume"
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
        lines = (json.dumps({"text": f"{name} {text}"}) for text in TEXTS)
        (root / name / "part.jsonl").write_text("\n".join(lines))
    return root


def records(**fields: object) -> DataSpec:
    return DataSpec(claim_name="v", format=DataFormat.JSON_LINES, **fields)


def row(volume: Path, spec: DataSpec, path: str | None = None) -> list[int]:
    corpus = open_corpus(spec, str(volume), path)
    return corpus.tokens(0, len(corpus)).tolist()


def want(name: str) -> list[int]:
    return [token for text in TEXTS for token in [*f"{name} {text}".encode(), BYTE_SEPARATOR]]


def test_records_are_tokenized_at_the_start(volume: Path) -> None:
    assert row(volume, records()) == want("a") + want("b")
    assert row(volume, records(pattern="b/*.jsonl")) == want("b")
    assert row(volume, records(), "b") == want("b")


def test_only_the_first_rank_of_a_pod_tokenizes(
    volume: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        threads = [threading.Thread(target=row, args=(volume, records())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum("tokenized 24 documents" in record.message for record in caplog.records) == 1
    (volume / "a" / "part.jsonl").write_text('{"text": "changed"}\n')
    assert row(volume, records(pattern="a/*")) == [*b"changed", BYTE_SEPARATOR]


def test_an_interrupted_tokenizing_is_done_again(volume: Path, cache: Path) -> None:
    corpus = open_corpus(records(), str(volume))
    (manifest,) = cache.glob("*/*/meshwright-tokens.json")
    manifest.unlink()
    again = open_corpus(records(), str(volume))
    assert again.fingerprint == corpus.fingerprint
    (shard,) = cache.glob("*/*/00000.tokens")
    shard.write_bytes(shard.read_bytes()[:-2])
    assert row(volume, records()) == want("a") + want("b")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.ENOLCK])
def test_scratch_space_that_cannot_be_used_is_named_and_not_the_data(
    volume: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    where = {errno.ENOSPC: (os, "fsync"), errno.EROFS: (Path, "mkdir"), errno.ENOLCK: (fcntl, "flock")}[number]
    monkeypatch.setattr(*where, failing)
    with pytest.raises(DataError) as caught:
        row(volume, records())
    said = f"the tokens of `data` cannot be written to {cache}/meshwright-tokens-{os.getuid()}: {os.strerror(number)}"
    assert str(caught.value).startswith(said)
    assert ENV_CACHE_DIR in str(caught.value)
    # A full disk may be emptied; a volume that is read-only stays so.
    assert is_storage_fault(caught.value) is (number != errno.EROFS)


def test_a_volume_full_of_other_files_is_not_listed_for_its_tokens(
    volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens may be at its root, next to a million files, and every rank opens them at every start."""
    tokenize(TextSource(open_directory(str(volume)), kind=DataFormat.JSON_LINES), ByteTokenizer(), volume / "tokens")
    monkeypatch.setattr(LocalDirectory, "files", None)
    spec = DataSpec(claim_name="v", format=DataFormat.TOKENS)
    assert row(volume, spec, "tokens") == want("a") + want("b")


def test_records_that_are_read_as_text_are_a_probable_mistake(volume: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_corpus(DataSpec(claim_name="v"), str(volume))
    assert "2 of 2 files, such as a/part.jsonl, have a record in each line" in caplog.text
    caplog.clear()
    open_corpus(records(), str(volume))
    assert caplog.text == ""


def test_tokens_that_are_read_as_text_are_a_probable_mistake(volume: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenize(TextSource(LocalDirectory(volume / "a"), kind=DataFormat.JSON_LINES), ByteTokenizer(), volume / "tokens")
    open_corpus(DataSpec(claim_name="v"), str(volume), "tokens")
    assert "meshwright-tokens.json says that its directory has tokens" in caplog.text
    caplog.clear()
    open_corpus(DataSpec(claim_name="v", format=DataFormat.TOKENS), str(volume), "tokens")
    assert caplog.text == ""


def test_records_without_text_are_not_a_pattern_without_a_match(volume: Path) -> None:
    (volume / "a" / "part.jsonl").write_text("broken\n" * 3)
    with pytest.raises(DataError, match=r"no text in part.jsonl: all of 3 records cannot be read \(part.jsonl:1: not"):
        open_corpus(records(on_corrupt_record=OnCorrupt.SKIP), str(volume), "a")


def test_documents_that_cross_the_border_of_shards_are_whole(volume: Path) -> None:
    source = TextSource(open_directory(str(volume)), kind=DataFormat.JSON_LINES)
    tokenize(source, ByteTokenizer(), volume.parent / "one")
    tokenize(source, ByteTokenizer(), volume.parent / "many", shard=50)
    spec = DataSpec(claim_name="v", format=DataFormat.TOKENS)
    one, many = (open_corpus(spec, str(volume.parent / name)) for name in ("one", "many"))
    assert len(list((volume.parent / "many").glob("*.tokens"))) > 10
    for start in range(0, len(one) - 200, 37):
        assert one.documents(start, start + 200) == many.documents(start, start + 200)
    assert one.documents(0, len(one)) == [len(f"{name} {text}".encode()) + 1 for name in ("a", "b") for text in TEXTS]


def test_tokens_written_before_are_the_same_row(volume: Path) -> None:
    tokenize(
        TextSource(open_directory(str(volume)), kind=DataFormat.JSON_LINES), ByteTokenizer(), volume.parent / "tokens"
    )
    spec = DataSpec(claim_name="v", format=DataFormat.TOKENS)
    assert row(volume.parent / "tokens", spec) == want("a") + want("b")
    remote = DataSpec(uri=f"local://{volume.parent / 'tokens'}", format=DataFormat.TOKENS)
    assert row(volume, remote) == want("a") + want("b")


def test_tokens_of_another_tokenizer_are_rejected(volume: Path, bpe_file: Path) -> None:
    tokens = volume.parent / "tokens"
    tokenize(TextSource(open_directory(str(volume)), kind=DataFormat.JSON_LINES), ByteTokenizer(), tokens)
    (tokens / "tokenizer.json").write_bytes(bpe_file.read_bytes())
    spec = DataSpec(claim_name="v", format=DataFormat.TOKENS, tokenizer=Tokenizer.BPE, tokenizer_file="tokenizer.json")
    with pytest.raises(DataError, match=r"contains tokens of `byte`, not of `bpe/"):
        open_corpus(spec, str(tokens))


@pytest.mark.parametrize("where", ["volume", "uri"])
def test_a_tokenizer_next_to_the_data(volume: Path, bpe_file: Path, where: str) -> None:
    (volume / "tokenizer.json").write_bytes(bpe_file.read_bytes())
    place = {"claim_name": "v"} if where == "volume" else {"uri": f"local://{volume}"}
    spec = DataSpec(
        **place,
        format=DataFormat.JSON_LINES,
        pattern="a/*.jsonl",
        tokenizer=Tokenizer.BPE,
        tokenizer_file="tokenizer.json",
    )
    corpus = open_corpus(spec, str(volume))
    found = corpus.tokens(0, len(corpus)).tolist()
    assert found.count(corpus.separator) == len(TEXTS)
    assert len(found) < len(want("a"))


def test_what_is_wrong_with_a_tokenizer_behind_a_uri_is_what_is_wrong_with_it_on_a_volume(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    for where in (str(tmp_path), f"zip://::file://{tmp_path}/a.zip"):
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
            archive.write(tmp_path / "tokenizer.json", "tokenizer.json")
        with pytest.raises(DataError, match=r"it has no `model`: copy the file from the model's repository again"):
            open_tokenizer_at(Tokenizer.BPE, where, "tokenizer.json")


def test_a_corrupt_record_fails_the_start_or_is_reported(volume: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (volume / "a" / "part.jsonl").open("a") as file:
        file.write("\nbroken\n")
    with pytest.raises(CorruptRecordError, match=r"a/part\.jsonl:13"):
        open_corpus(records(), str(volume))
    assert row(volume, records(on_corrupt_record=OnCorrupt.SKIP)) == want("a") + want("b")
    assert any("skipped: a/part.jsonl:13" in record.message for record in caplog.records)


def test_a_mixture_takes_samples_by_weight(volume: Path) -> None:
    parts = [MixturePart(path="a", weight=3), MixturePart(path="b", weight=1)]
    stream = open_stream(records(mixture=parts), str(volume), 8, 0)
    assert isinstance(stream, MixtureStream)
    batch = stream.batch(0, 400)
    alone = {name: SampleStream(open_corpus(records(), str(volume), name), 8, 0) for name in ("a", "b")}
    order = [stream._mixture.pick(number).corpus for number in range(400)]
    assert 270 <= order.count(0) <= 330
    for number, (corpus, sample) in enumerate(stream._mixture.pick(n) for n in range(400)):
        assert torch.equal(batch[number], alone["ab"[corpus]].batch(sample, 1)[0])
    assert torch.equal(stream.batch(123, 5), batch[123:128])


def test_a_mixture_is_another_stream_when_a_weight_changes(volume: Path) -> None:
    def identity(weight: float) -> str:
        parts = [MixturePart(path="a", weight=weight), MixturePart(path="b")]
        return open_stream(records(mixture=parts), str(volume), 8, 0).identity

    assert identity(2) != identity(1) == identity(1)


def test_a_weight_too_small_names_the_field(volume: Path) -> None:
    parts = [MixturePart(path="a"), MixturePart(path="b", weight=0.0001)]
    with pytest.raises(DataError, match=r"`data.mixture`: weight 0.0001"):
        open_stream(records(mixture=parts), str(volume), 8, 0)


def test_tokens_are_those_of_the_directory_and_of_the_files_as_they_are(volume: Path) -> None:
    """`a` and `b` have files of equal names and sizes, as shards of corpora and of islands may."""
    assert row(volume, records(), "a") == want("a")
    assert row(volume, records(), "b") == want("b")
    assert row(volume / "b", records()) == want("b")
    file = volume / "a" / "part.jsonl"
    before = file.stat()
    file.write_bytes((volume / "b" / "part.jsonl").read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert row(volume, records(), "a") == want("b")


@pytest.mark.parametrize("kind", [DataFormat.TEXT, DataFormat.JSON_LINES])
@pytest.mark.parametrize("path", [None, "a"])
def test_the_tokenizers_file_is_not_text(volume: Path, bpe_file: Path, kind: DataFormat, path: str | None) -> None:
    (volume / "a" / "tokenizer.json").write_bytes(bpe_file.read_bytes())
    bpe = {"tokenizer": Tokenizer.BPE, "tokenizer_file": "a/./tokenizer.json"}
    found = [
        row(volume, DataSpec(claim_name="v", format=kind, pattern=pattern, **bpe), path)
        for pattern in ("**/*.jsonl", "**/*")
    ]
    assert found[0] == found[1]


def test_names_that_are_no_utf_8(volume: Path) -> None:
    (volume / "a" / "part.jsonl").rename(os.fsdecode(os.fsencode(volume) + b"/caf\xe9.jsonl"))
    assert row(volume, records()) == want("b") + want("a")
    assert open_stream(DataSpec(claim_name="v"), str(volume), 8, 0).identity


def test_every_share_held_out_is_another_stream(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"{number:04}.txt").write_text("ab")
    shares = (0.1, 0.105, 0.11)
    streams = [
        open_stream(DataSpec(claim_name="v", held_out=share), str(tmp_path), 4, 0, held_out=held)
        for share in shares
        for held in (False, True)
    ]
    assert len({stream.identity for stream in streams}) == len(streams)


def shorten(volume: Path) -> None:
    (volume / "b" / "part.jsonl").write_text('{"text": "b"}')


def spoil(volume: Path) -> None:
    (volume / "b" / "part.jsonl").write_text("broken")


@pytest.mark.parametrize(
    ("damage", "fields", "error"),
    [
        (shorten, {}, "`training.sequenceLength` may be at most 1"),
        (spoil, {}, r"part\.jsonl:1: not JSON"),
        (shorten, {"held_out": 0.1}, "`data.heldOut: 0.1` holds out no document"),
    ],
)
def test_errors_say_which_corpus_of_a_mixture(
    volume: Path, damage: Callable[[Path], None], fields: dict[str, object], error: str
) -> None:
    damage(volume)
    mixture = [MixturePart(path="a"), MixturePart(path="b")]
    with pytest.raises(DataError, match=rf"^`data\.mixture` with `path: b`: .*{error}") as raised:
        open_stream(records(mixture=mixture, **fields), str(volume), 8, 0)
    assert isinstance(raised.value, CorruptRecordError) == (damage is spoil)


def test_a_mixture_inside_an_archive(volume: Path) -> None:
    with zipfile.ZipFile(volume.parent / "z.zip", "w") as archive:
        for name in ("a", "b"):
            archive.write(volume / name / "part.jsonl", f"{name}/part.jsonl")
    spec = DataSpec(uri=f"zip://::file://{volume.parent}/z.zip", format=DataFormat.JSON_LINES)
    assert row(volume, spec, "b") == want("b")


def test_an_empty_file_next_to_tables_is_not_a_table(volume: Path) -> None:
    parquet.write_table(pyarrow.table({"text": ["one"]}), volume / "part.parquet")
    (volume / "_SUCCESS").touch()
    spec = DataSpec(claim_name="v", format=DataFormat.PARQUET, pattern="*")
    assert row(volume, spec) == [*b"one", BYTE_SEPARATOR]
    (volume / "README").write_text("no table")
    with pytest.raises(DataError, match=r"README is not a complete Parquet file.*`data.pattern`"):
        row(volume, spec)
