"""Documents out of files: each format, and what becomes of records that cannot be read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from meshwright.api.data import DataFormat, OnCorrupt
from meshwright.data.documents import MAX_EXAMPLES, SkippedRecords, documents
from meshwright.data.errors import CorruptRecordError, DataError
from meshwright.data.files import FileEntry, LocalDirectory, matching_files, open_directory

TEXTS = ["one", "two\nlines", "", "drei: ü"]


def read(
    path: Path, kind: DataFormat, on_corrupt: OnCorrupt = OnCorrupt.FAIL, key: str = "text"
) -> tuple[list[str], SkippedRecords]:
    skipped = SkippedRecords()
    entry = FileEntry(path.name, path.stat().st_size)
    return list(documents(LocalDirectory(path.parent), entry, kind, key, on_corrupt, skipped)), skipped


def lines(*records: object) -> bytes:
    return "".join(f"{json.dumps(record)}\n" for record in records).encode()


def test_every_line_of_json_lines_is_a_document(tmp_path: Path) -> None:
    content = lines(*({"text": text, "n": 1} for text in TEXTS)) + b"\n"
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content))
    for name in ("a.jsonl", "b.jsonl.gz"):
        assert read(tmp_path / name, DataFormat.JSON_LINES) == ([text for text in TEXTS if text], SkippedRecords())


def test_every_row_of_parquet_is_a_document(tmp_path: Path) -> None:
    table = pyarrow.table({"body": [*TEXTS, None], "n": range(len(TEXTS) + 1)})
    parquet.write_table(table, tmp_path / "a.parquet")
    found, skipped = read(tmp_path / "a.parquet", DataFormat.PARQUET, OnCorrupt.SKIP, "body")
    assert found == [text for text in TEXTS if text]
    assert skipped.examples == ["a.parquet: row 5 has no text in `body`"]
    with pytest.raises(DataError, match="no column `text`: set `data.field` to one of body, n"):
        read(tmp_path / "a.parquet", DataFormat.PARQUET)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"{", "not JSON"),
        (b"[1]", "no text in field"),
        (b'{"text": 3}', "no text in field"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (rb'{"text": "ab\ud800"}', "half a surrogate pair at character 2"),
        (b'{"text": "\xed\xa0\x80"}', "half a surrogate pair at character 0"),
    ],
)
def test_a_corrupt_line_fails_or_is_reported(tmp_path: Path, bad: bytes, reason: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines({"text": "good"}) + bad + b"\n" + lines({"text": "after"}))
    with pytest.raises(CorruptRecordError, match=rf"a\.jsonl:2: {reason}"):
        read(tmp_path / "a.jsonl", DataFormat.JSON_LINES)
    found, skipped = read(tmp_path / "a.jsonl", DataFormat.JSON_LINES, OnCorrupt.SKIP)
    assert found == ["good", "after"]
    assert skipped.count == 1
    assert skipped.examples[0].startswith(f"a.jsonl:2: {reason}")


def test_a_pair_of_surrogates_is_a_character(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(rb'{"text": "\ud83d\ude00"}')
    assert read(tmp_path / "a.jsonl", DataFormat.JSON_LINES) == (["😀"], SkippedRecords())


@pytest.mark.parametrize("kind", [pyarrow.binary(), pyarrow.large_binary(), pyarrow.string()], ids=str)
def test_a_corrupt_cell_fails_or_is_reported(tmp_path: Path, kind: pyarrow.DataType) -> None:
    cells = pyarrow.array([b"good", b"ab\xff", "nach: ü".encode()], pyarrow.binary())
    if pyarrow.types.is_string(kind):
        # As a writer does that does not look: Parquet's own readers take such columns.
        column = pyarrow.StringArray.from_buffers(3, cells.buffers()[1], cells.buffers()[2])
    else:
        column = cells.cast(kind)
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(CorruptRecordError, match=r"a\.parquet: row 2: not UTF-8 at byte 2"):
        read(tmp_path / "a.parquet", DataFormat.PARQUET)
    found, skipped = read(tmp_path / "a.parquet", DataFormat.PARQUET, OnCorrupt.SKIP)
    assert found == ["good", "nach: ü"]
    assert (skipped.count, skipped.examples) == (1, ["a.parquet: row 2: not UTF-8 at byte 2"])


def test_many_corrupt_records_are_counted_and_some_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"broken\n" * 100 + lines({"text": "good"}))
    found, skipped = read(tmp_path / "a.jsonl", DataFormat.JSON_LINES, OnCorrupt.SKIP)
    assert (found, skipped.count, len(skipped.examples)) == (["good"], 100, MAX_EXAMPLES)


def test_text_that_is_no_utf_8_is_a_corrupt_record(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(CorruptRecordError, match="a.txt: not UTF-8 at byte 2"):
        read(tmp_path / "a.txt", DataFormat.TEXT)


def test_a_broken_archive_and_a_broken_table_are_never_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines({"text": "x" * 999}))[:-9])
    whole = bytearray(gzip.compress(lines({"text": "x" * 999})))
    whole[15] ^= 0xFF
    (tmp_path / "b.jsonl.gz").write_bytes(whole)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no table")
    with pytest.raises(DataError, match=r"b\.jsonl\.gz cannot be read to its end"):
        read(tmp_path / "b.jsonl.gz", DataFormat.JSON_LINES, OnCorrupt.SKIP)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz cannot be read to its end"):
        read(tmp_path / "a.jsonl.gz", DataFormat.JSON_LINES, OnCorrupt.SKIP)
    with pytest.raises(DataError, match=r"a\.parquet is not a complete Parquet file"):
        read(tmp_path / "a.parquet", DataFormat.PARQUET, OnCorrupt.SKIP)


def test_a_directory_behind_a_uri_is_the_same_directory(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("abc")
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / "b.md").write_text("b")
    local = open_directory(str(tmp_path))
    remote = open_directory(f"local://{tmp_path}")
    assert local.files() == remote.files() == [FileEntry("b.md", 1), FileEntry("deep/a.txt", 3)]
    assert [entry.name for entry in matching_files(remote, "**/*.txt")] == ["deep/a.txt"]
    with remote.open("deep/a.txt") as file:
        assert file.read() == b"abc"
    assert open_directory(f"file://{tmp_path}").local("b.md") == tmp_path / "b.md"


@pytest.mark.parametrize("where", ["nosuch://bucket/x", "/no/such/directory"])
def test_a_directory_that_cannot_be_opened(where: str) -> None:
    with pytest.raises(DataError, match="nosuch|/no/such/directory is not a directory"):
        open_directory(where)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (gzip.compress(lines({"text": "a"})), r"a\.jsonl is compressed with gzip: end its name in `\.gz`"),
        (b"\x28\xb5\x2f\xfd" + b"x\n" * 9, r"a\.jsonl is compressed with zstd: decompress it"),
        (b"PAR1" + bytes(9), r"a\.jsonl is a Parquet file: use `data\.format: Parquet`"),
        ('{"text": "a"}\n'.encode("utf-16"), r"a\.jsonl is UTF-16: convert it to UTF-8"),
    ],
    ids=["gzip", "zstd", "parquet", "utf-16"],
)
def test_a_file_without_lines_of_text_is_one_corrupt_record(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(CorruptRecordError, match=says):
        read(tmp_path / "a.jsonl", DataFormat.JSON_LINES)
    found, skipped = read(tmp_path / "a.jsonl", DataFormat.JSON_LINES, OnCorrupt.SKIP)
    assert (found, skipped.count) == ([], 1)


@pytest.mark.parametrize("content", [b'[\n{"text": "a"}\n]\n', b'[{"text": "a"}]', b'{\n "text": "a"\n}\n'])
def test_json_that_is_not_one_object_per_line_says_how_to_convert_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(CorruptRecordError, match="each line must be a JSON object; .* `jq -c"):
        read(tmp_path / "a.json", DataFormat.JSON_LINES)


def test_a_record_without_the_field_names_those_with_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines({"content": "a", "id": 3, "title": "b"}))
    with pytest.raises(CorruptRecordError, match=r"set `data\.field` to another: `content`, `title`"):
        read(tmp_path / "a.jsonl", DataFormat.JSON_LINES)


def test_compressed_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(gzip.compress(b"text"))
    with pytest.raises(CorruptRecordError, match=r"not UTF-8 at byte 1 \(it is compressed with gzip\)"):
        read(tmp_path / "a.txt", DataFormat.TEXT)
