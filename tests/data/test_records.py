"""Documents out of files: each format, and what becomes of records that cannot be read."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import json
import lzma
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from meshwright.api.data import DataFormat, OnCorrupt
from meshwright.data.documents import MAX_EXAMPLES, SkippedRecords, documents
from meshwright.data.documents import lines as records_of
from meshwright.data.errors import CorruptRecordError, DataError, is_storage_fault
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


COMPRESSORS = {
    ".gz": gzip.compress,
    ".zst": lambda content: pyarrow.compress(content, "zstd", asbytes=True),
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}


@pytest.mark.parametrize("ending", COMPRESSORS)
def test_lines_are_decompressed_by_the_end_of_the_name(tmp_path: Path, ending: str) -> None:
    compress, path = COMPRESSORS[ending], tmp_path / f"a.jsonl{ending}"
    records = [{"text": f"{number} ü " + "x" * (number % 500)} for number in range(3000)]
    # Shards are joined with `cat`, and some programs write one block after the other.
    path.write_bytes(compress(lines(*records[:1000])) + compress(lines(*records[1000:])))
    assert read(path, DataFormat.JSON_LINES)[0] == [record["text"] for record in records]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "other"])
@pytest.mark.parametrize("ending", [*COMPRESSORS, ".parquet"])
def test_damage_is_not_tried_again_as_a_fault_of_the_storage(tmp_path: Path, ending: str, damage: str) -> None:
    content = lines(*({"text": f"{n * n} " * 20} for n in range(2000)))
    if ending == ".parquet":
        parquet.write_table(pyarrow.table({"text": [str(n * n) * 9 for n in range(2000)]}), tmp_path / "table")
    compressed = bytearray((tmp_path / "table").read_bytes() if ending == ".parquet" else COMPRESSORS[ending](content))
    middle = len(compressed) // 3
    compressed[middle : middle + 40] = bytes(40 if damage == "flipped" else 0) or compressed[middle : middle + 40]
    found = {"truncated": compressed[:middle], "flipped": compressed, "other": content}[damage]
    path = tmp_path / f"a{ending}"
    path.write_bytes(found)
    kind = DataFormat.PARQUET if ending == ".parquet" else DataFormat.JSON_LINES
    with pytest.raises(DataError, match="a.* cannot be read to its end|is not a complete Parquet file") as caught:
        read(path, kind, OnCorrupt.SKIP)
    assert not is_storage_fault(caught.value)


def test_storage_that_fails_in_a_file_is_tried_again(tmp_path: Path) -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() > 100:
                raise OSError(errno.ESTALE, "Stale file handle")
            return super().read(50 if size is None or size < 0 else min(50, size))

        read1 = readinto = None  # type: ignore[assignment]

    content = gzip.compress(lines(*({"text": f"{n * n}"} for n in range(2000))))
    with pytest.raises(DataError) as caught:
        list(records_of(Failing(content), "a.jsonl.gz"))
    assert is_storage_fault(caught.value)


def test_a_byte_order_mark_before_a_line_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines({"text": "a"}, {"text": "b"}))
    assert read(tmp_path / "a.jsonl", DataFormat.JSON_LINES)[0] == ["a", "b"]


def test_lines_in_another_encoding_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines({"text": "a"}) + '{"text": "ü"}\n'.encode("latin-1"))
    with pytest.raises(CorruptRecordError, match=r"a\.jsonl:2: not JSON \('utf-8' codec can't decode byte 0xfc"):
        read(tmp_path / "a.jsonl", DataFormat.JSON_LINES)
    found, skipped = read(tmp_path / "a.jsonl", DataFormat.JSON_LINES, OnCorrupt.SKIP)
    assert (found, skipped.count) == (["a"], 1)


def test_a_file_next_to_the_records_is_to_be_excluded(tmp_path: Path) -> None:
    """Snapshots of published data sets have a README."""
    for name in ("README.md", "a.jsonl"):
        (tmp_path / name).write_text("# A data set\n")
    with pytest.raises(CorruptRecordError, match=r"README\.md:1: not JSON .* exclude it with `data\.pattern`"):
        read(tmp_path / "README.md", DataFormat.JSON_LINES)
    with pytest.raises(CorruptRecordError, match=r"a\.jsonl:1: not JSON") as caught:
        read(tmp_path / "a.jsonl", DataFormat.JSON_LINES)
    assert "data.pattern" not in str(caught.value)


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
        (b"\x28\xb5\x2f\xfd" + b"x\n" * 9, r"a\.jsonl is compressed with zstd: end its name in `\.zst`"),
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
