"""Tokens on disk: the same tokens back, on every way of reading, and damage found."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models

from meshwright.api.data import DataFormat, OnCorrupt, Tokenizer
from meshwright.data.checksums import BLOCK
from meshwright.data.errors import DataError
from meshwright.data.files import LocalDirectory, open_directory
from meshwright.data.shards import MANIFEST, ShardWriter, TokenShards
from meshwright.data.tokenize import TextSource, tokenize
from meshwright.data.tokenizers import ByteTokenizer, open_tokenizer
from meshwright.data.verify_shards import verify
from meshwright.manifest_checksum import with_checksum


def write(directory: Path, documents: list[list[int]], shard: int = 7, vocabulary: int = 300) -> None:
    writer = ShardWriter(directory, "test", vocabulary, 256, shard)
    writer.add(documents)
    writer.close()


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_slice_of_any_shards(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    tokens = st.lists(st.integers(0, 299), max_size=12)
    documents = data.draw(st.lists(tokens, min_size=1, max_size=8))
    directory = tmp_path_factory.mktemp("shards")
    vocabulary = data.draw(st.sampled_from([300, 70_000]))
    write(directory, documents, data.draw(st.integers(1, 40)), vocabulary)
    row = [token for document in documents for token in [*document, 256]]
    start = data.draw(st.integers(0, len(row)))
    stop = data.draw(st.integers(start, len(row)))
    for where in (str(directory), f"local://{directory}"):
        shards = TokenShards(open_directory(where))
        assert len(shards) == len(row)
        assert shards.tokens(start, stop).tolist() == row[start:stop]
    assert verify(open_directory(str(directory)))[1] == []


def open_shards(where: Path) -> TokenShards:
    return TokenShards(LocalDirectory(where))


def test_the_same_text_gives_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number in range(5):
        (tmp_path / "text" / f"{number}.txt").write_text("word " * number)
    source = TextSource(open_directory(str(tmp_path / "text")))
    (one, _), (other, _) = (tokenize(source, ByteTokenizer(), tmp_path / name, shard=8) for name in ("a", "b"))
    assert one == other
    assert one.fingerprint == other.fingerprint
    assert one.documents == 4  # the empty one is none
    assert open_shards(tmp_path / "a").tokens(0, 6).tolist() == [*b"word ", 256]


def test_an_id_that_no_tokenizer_gave_is_found_when_it_is_read(tmp_path: Path) -> None:
    # Its checksum is right: whoever wrote the manifest was wrong.
    write(tmp_path, [[1, 2, 300], [4, 5, 6]], vocabulary=300)
    shards = open_shards(tmp_path)
    assert shards.tokens(3, 7).tolist() == [256, 4, 5, 6]
    with pytest.raises(DataError, match=r"token 300 at 2 is outside the manifest's vocabulary of 300: .*data verify"):
        shards.tokens(1, 7)


def test_a_vocabulary_counts_holes_between_ids(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 70_000, "<eos>": 5}, merges=[])).save(str(path))
    tokenizer = open_tokenizer(Tokenizer.BPE, path)
    assert tokenizer.encode(["ab"]) == [[0, 70_000]]
    assert tokenizer.vocabulary == 70_001
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a").write_text("ab")
    tokenize(TextSource(open_directory(str(tmp_path / "text"))), tokenizer, tmp_path / "tokens")
    assert open_shards(tmp_path / "tokens").tokens(0, 3).tolist() == [0, 70_000, 5]


def test_wide_vocabularies_need_wide_tokens(tmp_path: Path) -> None:
    write(tmp_path / "narrow", [[1]], vocabulary=1 << 16)
    write(tmp_path / "wide", [[1]], vocabulary=(1 << 16) + 1)
    assert open_shards(tmp_path / "narrow").manifest.dtype == "uint16"
    assert open_shards(tmp_path / "wide").manifest.dtype == "uint32"


def test_damage_is_found(tmp_path: Path) -> None:
    write(tmp_path, [[1, 2, 3], [4, 5, 6], [7]], shard=4)
    target = tmp_path / "00001.tokens"
    whole = target.read_bytes()
    flipped = bytearray(whole)
    flipped[2] ^= 1
    target.write_bytes(bytes(flipped))
    assert [
        "CRC-32" in problem and "00001.tokens" in problem for problem in verify(open_directory(str(tmp_path)))[1]
    ] == [True]
    target.write_bytes(whole[:-2])
    assert "expected 8 bytes, found 6" in verify(open_directory(str(tmp_path)))[1][0]
    with pytest.raises(DataError, match="00001.tokens has 6 bytes, but the manifest has 8"):
        open_shards(tmp_path)
    target.unlink()
    with pytest.raises(DataError, match="00001.tokens has no bytes"):
        open_shards(tmp_path)
    assert "cannot be read" in verify(open_directory(str(tmp_path)))[1][0]


def flip(path: Path, byte: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("scheme", ["", "local://"])
def test_a_flipped_bit_is_an_error_when_its_block_is_read_and_not_before(tmp_path: Path, scheme: str) -> None:
    tokens = BLOCK // 2
    write(tmp_path, [[1] * (2 * tokens + tokens // 2)], shard=1 << 30)
    flip(tmp_path / "00000.tokens", BLOCK + 77)
    shards = TokenShards(open_directory(f"{scheme}{tmp_path}"))
    assert shards.tokens(tokens - 1, tokens).tolist() == [1]
    assert shards.tokens(2 * tokens, len(shards))[-1] == 256
    for start, stop in ((tokens - 1, tokens + 1), (2 * tokens - 1, 2 * tokens), (0, len(shards))):
        with pytest.raises(
            DataError, match=r"00000\.tokens is damaged: wrong checksum of bytes 1048576 to 2097151 .* `meshwright data"
        ):
            shards.tokens(start, stop)


def test_directories_without_checksums_of_blocks_are_checked_by_shard(tmp_path: Path) -> None:
    write(tmp_path, [[1, 2, 3], [4, 5, 6], [7]], shard=4)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    for shard in manifest["shards"]:
        del shard["blockCrc32"]
    (tmp_path / MANIFEST).write_text(json.dumps(with_checksum(manifest)))
    flip(tmp_path / "00001.tokens", 0)
    shards = open_shards(tmp_path)
    assert shards.tokens(0, 4).tolist() == [1, 2, 3, 256]
    with pytest.raises(DataError, match="00001.tokens is damaged"):
        shards.tokens(7, 8)
    manifest["shards"][0]["blockCrc32"] = [1, 2]
    (tmp_path / MANIFEST).write_text(json.dumps(with_checksum(manifest)))
    with pytest.raises(DataError, match="damaged: 00000.tokens has 2 checksums"):
        open_shards(tmp_path)


def test_a_manifest_whose_checksums_of_blocks_are_wrong_is_not_called_intact(tmp_path: Path) -> None:
    write(tmp_path, [[1] * BLOCK])
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    manifest["shards"][0]["blockCrc32"][1] ^= 1
    (tmp_path / MANIFEST).write_text(json.dumps(with_checksum(manifest)))
    assert f"00000.tokens: intact, but {MANIFEST} is damaged" in verify(open_directory(str(tmp_path)))[1][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"vocabulary": 300', '"vocabulary": 302'), "damaged: its content differs"),
        (lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "checksum"}), "no checksum"),
        (lambda text: json.dumps(with_checksum({**json.loads(text), "format": 2})), "has format 2: this version reads"),
        (lambda text: json.dumps(with_checksum({"format": 2, "index": []})), "has format 2: this version reads"),
        (lambda text: text[: len(text) // 2], "damaged: it is not a JSON object"),
    ],
)
def test_a_damaged_manifest_and_one_of_another_format_are_told_apart(
    tmp_path: Path, change: Callable[[str], str], message: str
) -> None:
    write(tmp_path, [[1, 2, 3]])
    before = (tmp_path / MANIFEST).read_text()
    (tmp_path / MANIFEST).write_text(change(before))
    assert (tmp_path / MANIFEST).read_text() != before
    with pytest.raises(DataError, match=message):
        open_shards(tmp_path)


def test_what_a_later_version_adds_to_the_manifest_is_ignored(tmp_path: Path) -> None:
    write(tmp_path, [[1, 2, 3]])
    fields = json.loads((tmp_path / MANIFEST).read_text())
    fields["shards"][0]["newField"] = fields["newField"] = [1]
    (tmp_path / MANIFEST).write_text(json.dumps(with_checksum(fields)))
    assert open_shards(tmp_path).tokens(0, 3).tolist() == [1, 2, 3]


def test_a_writer_holds_two_shards_in_memory_and_not_three(tmp_path: Path) -> None:
    documents, rows = np.ones(65_535, dtype=np.int64), 64
    size = rows * 65_536 * 2
    tracemalloc.start()
    try:
        writer = ShardWriter(tmp_path, "test", 300, 256, rows * 65_536)
        writer.add(documents for _ in range(rows))
        assert tracemalloc.get_traced_memory()[1] < 2.3 * size
    finally:
        tracemalloc.stop()
    writer.close()
    assert verify(open_directory(str(tmp_path)))[1] == []


def test_short_documents_take_little_more_memory_than_their_tokens(tmp_path: Path) -> None:
    """Each was an array of its own, of 150 bytes: a shard of short documents took gigabytes."""
    writer = ShardWriter(tmp_path, "test", 300, 256, 1 << 30)
    tracemalloc.start()
    try:
        for _ in range(100):
            writer.add([[1, 2, 3, 4, 5]] * 256)
        assert tracemalloc.get_traced_memory()[0] < 1.5 * 100 * 256 * 6 * 2
    finally:
        tracemalloc.stop()


def test_the_name_of_a_special_token_in_a_document_is_text(tmp_path: Path, bpe_file: Path) -> None:
    tokenizer = open_tokenizer(Tokenizer.BPE, bpe_file)
    text = "GPT-2 writes <|endoftext|> between documents"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    tokenize(
        TextSource(open_directory(str(tmp_path)), "*.jsonl", DataFormat.JSON_LINES), tokenizer, tmp_path / "tokens"
    )
    shards = open_shards(tmp_path / "tokens")
    row = shards.tokens(0, len(shards)).tolist()
    assert [token == tokenizer.separator for token in row] == [False] * (len(row) - 1) + [True]
    assert tokenizer.decode(row).strip() == text
    # A chat template is written with the names of its tokens.
    assert tokenizer.separator in tokenizer.encode([text])[0]


def test_tokens_outside_the_vocabulary_are_found(tmp_path: Path) -> None:
    write(tmp_path, [[299]], vocabulary=299)
    assert "token 299 is outside the vocabulary of 299" in verify(open_directory(str(tmp_path)))[1][0]


def test_a_directory_without_or_with_a_broken_manifest(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="meshwright data tokenize"):
        open_shards(tmp_path)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(DataError, match="damaged"):
        open_shards(tmp_path)


def test_nothing_is_written_over(tmp_path: Path) -> None:
    write(tmp_path, [[1]])
    with pytest.raises(DataError, match="already contains tokens"):
        write(tmp_path, [[1]])


def test_no_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    with pytest.raises(DataError, match=r"no file matches `data.pattern: \*\*/\*`"):
        tokenize(TextSource(open_directory(str(tmp_path / "text"))), ByteTokenizer(), tmp_path / "out")


@pytest.mark.parametrize("kind", [Tokenizer.BPE, Tokenizer.SENTENCE_PIECE])
def test_libraries_tokens_come_back_as_text(
    tmp_path: Path, kind: Tokenizer, bpe_file: Path, sentencepiece_file: Path
) -> None:
    tokenizer = open_tokenizer(kind, bpe_file if kind is Tokenizer.BPE else sentencepiece_file)
    (tmp_path / "text.jsonl").write_text('{"text": "the quick brown fox"}\n{"text": "the lazy dog"}\n')
    source = TextSource(open_directory(str(tmp_path)), "*.jsonl", DataFormat.JSON_LINES, "text", OnCorrupt.FAIL)
    manifest, _ = tokenize(source, tokenizer, tmp_path / "tokens")
    shards = open_shards(tmp_path / "tokens")
    row = shards.tokens(0, len(shards))
    assert manifest.vocabulary == tokenizer.vocabulary > int(row.max())
    assert int(np.sum(row == tokenizer.separator)) == 2
    assert [text.strip() for text in tokenizer.decode(row.tolist()).split("\n")] == [
        "the quick brown fox",
        "the lazy dog",
        "",
    ]


@pytest.mark.parametrize("kind", [Tokenizer.BPE, Tokenizer.SENTENCE_PIECE])
def test_a_file_that_is_not_a_tokenizer(tmp_path: Path, kind: Tokenizer) -> None:
    (tmp_path / "x").write_text("{}")
    with pytest.raises(DataError, match="is no"):
        open_tokenizer(kind, tmp_path / "x")
    with pytest.raises(DataError, match=r"`data.tokenizerFile`: .*cannot be read"):
        open_tokenizer(kind, tmp_path / "missing")
    with pytest.raises(DataError, match=r"needs `data.tokenizerFile`"):
        open_tokenizer(kind, None)
