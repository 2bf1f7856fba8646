"""Reads documents: a text file, a line of JSON Lines or a row of Parquet is one document.

A record that cannot be read is never skipped silently: it ends the reading, or is counted and reported.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import IO, Any

from meshwright.api.data import DataFormat, OnCorrupt
from meshwright.data.errors import CorruptRecordError, DataError
from meshwright.data.files import Directory, FileEntry

MAX_EXAMPLES = 20
"""Number of skipped records that are reported one by one."""
_PARQUET_ROWS = 1024
_BINARY_FORMATS = {
    b"\x1f\x8b": ("compressed with gzip", "end its name in `.gz`"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "end its name in `.zst`"),
    b"\xfd7zXZ": ("compressed with xz", "end its name in `.xz`"),
    b"BZh": ("compressed with bzip2", "end its name in `.bz2`"),
    b"PK\x03\x04": ("a zip archive", "unpack it"),
    b"PAR1": ("a Parquet file", "use `data.format: Parquet`"),
    b"\xff\xfe": ("UTF-16", "convert it to UTF-8"),
    b"\xfe\xff": ("UTF-16", "convert it to UTF-8"),
}
"""The first bytes of files without lines of UTF-8: what the file is, and what to do. No line of JSON begins so."""
_MAGIC = 6
COMPRESSED_ENDINGS = (".gz", ".zst", ".xz", ".bz2", ".zip", ".parquet")
"""Ends of the names of files that are not text."""
RECORD_ENDINGS = (".json", ".ndjson")
"""Parts of the names of files with a record in each line. A data set often has a `README.md` next to them."""
_MAX_NAMES, _LONGEST_NAME = 8, 64
_ONE_OBJECT_PER_LINE = "each line must be a JSON object; write the items of an array, one per line, with `jq -c '.[]'`"


@dataclass
class SkippedRecords:
    """The records that were skipped."""

    count: int = 0
    examples: list[str] = field(default_factory=list)
    """The first skipped records, with file, line and reason."""

    def add(self, what: str) -> None:
        """Count one more record."""
        self.count += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(what)


def documents(
    directory: Directory,
    entry: FileEntry,
    kind: DataFormat,
    key: str,
    on_corrupt: OnCorrupt,
    skipped: SkippedRecords,
    on_read: Callable[[float], None] = lambda _: None,
) -> Iterator[str]:
    """The documents of one file, in order, without empty ones.

    Args:
        directory: where the file is.
        entry: the file.
        kind: its format, any but `Tokens`.
        key: the field or column that holds the text; not used for text files.
        on_corrupt: what to do with a record that cannot be read.
        skipped: what was passed over is added here.
        on_read: called with the share of the file that is read, before each document, and with 1 at its end.

    Raises:
        CorruptRecordError: a record cannot be read, and `on_corrupt` is `Fail`.
        DataError: the file is not of this format at all.
    """
    readers = {DataFormat.TEXT: _text, DataFormat.JSON_LINES: _json_lines, DataFormat.PARQUET: _parquet}
    with directory.open(entry.name) as file:
        for found, share in readers[kind](file, entry, key):
            on_read(share)
            if isinstance(found, CorruptRecordError):
                if on_corrupt is OnCorrupt.FAIL:
                    raise found
                skipped.add(str(found))
            elif found:
                yield found
    on_read(1.0)


_Read = tuple[str | CorruptRecordError, float]
"""A document, and the share of its file that is read."""


def share_read(file: IO[bytes], entry: FileEntry) -> float:
    """How much of a file is read, from 0 to 1; of a compressed file, of its bytes as they are."""
    return min(1.0, file.tell() / entry.size) if entry.size else 1.0


def _text(file: IO[bytes], entry: FileEntry, key: str) -> Iterator[_Read]:
    try:
        yield file.read().decode(), 1.0
    except UnicodeDecodeError as error:
        found = _binary_format(error.object)
        what = f" (it is {found[0]})" if found else ""
        yield CorruptRecordError(f"{entry.name}: not UTF-8 at byte {error.start}{what}"), 1.0


def _json_lines(file: IO[bytes], entry: FileEntry, key: str) -> Iterator[_Read]:
    for where, line in lines(file, entry.name):
        found = line if isinstance(line, CorruptRecordError) else _line(line, where, key)
        yield found, share_read(file, entry)


def lines(file: IO[bytes], name: str) -> Iterator[tuple[str, bytes | CorruptRecordError]]:
    """The non-empty lines of a file, with file name and line number. Decompresses if `name` ends in `.gz`, `.zst`,
    `.xz` or `.bz2`.

    A file that does not contain lines of text, such as a zip archive, is one corrupt record.

    Raises:
        DataError: it cannot be read to its end.
    """
    decompress = _DECOMPRESSORS.get(name[name.rfind(".") :], nullcontext)
    try:
        head = file.read(_MAGIC)
        file.seek(0)
        if decompress is nullcontext and (found := _binary_format(head)) is not None:
            yield name, CorruptRecordError(f"{name} is {found[0]}: {found[1]}")
            return
        with decompress(file) as content:
            for number, line in enumerate(content, start=1):
                if line.strip():
                    yield f"{name}:{number}", line
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        # A broken archive loses every line after the break, not only one record.
        raise DataError(f"{name} cannot be read to its end: {error}") from _unless_damage(error)


def _unless_damage(error: Exception) -> Exception | None:
    """The error as a cause, unless it is about the content of a file: reading it again would end the same way.

    Decompressors and the reader of Parquet raise an OSError without a number for that. Those of storage have one.
    """
    return None if isinstance(error, OSError) and type(error) in _OF_CONTENT and error.errno is None else error


_OF_CONTENT = (OSError, gzip.BadGzipFile)


def _zstd(file: IO[bytes]) -> IO[bytes]:
    """A file that is compressed with zstd, from the library that also reads Parquet."""
    try:
        import pyarrow
    except ImportError as error:
        raise DataError("files whose names end in `.zst` need pyarrow: install `meshwright[data]`") from error
    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd"))


_DECOMPRESSORS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": gzip.open,
    ".zst": _zstd,
    ".xz": lzma.open,
    ".bz2": bz2.open,
}
"""How to read a file, by the end of its name."""


def _binary_format(head: bytes) -> tuple[str, str] | None:
    """What a file is that begins with these bytes, and what to do, if it is not text."""
    return next((found for magic, found in _BINARY_FORMATS.items() if head.startswith(magic)), None)


def _line(line: bytes, where: str, key: str) -> str | CorruptRecordError:
    record = parse_json(line, where)
    if isinstance(record, CorruptRecordError):
        return record
    if not isinstance(record, dict):
        return CorruptRecordError(f"{where}: no text in field `{key}`: {_ONE_OBJECT_PER_LINE}")
    text = record.get(key)
    if not isinstance(text, str):
        return CorruptRecordError(f"{where}: no text in field `{key}` (set `data.field` to another{_names(record)})")
    return encoding_problem(text, where) or text


def _names(record: dict[str, Any]) -> str:
    """The fields of a record that contain text, for an error."""
    found = [f"`{name}`" for name, value in record.items() if isinstance(value, str) and len(name) <= _LONGEST_NAME]
    return f": {', '.join(found[:_MAX_NAMES])}" if found else ""


def parse_json(line: bytes, where: str) -> Any:
    """The value of a line of JSON, or a `CorruptRecordError` that names `where`."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        # The first line of a file that contains one array or one object over several lines.
        hint = f"; {_ONE_OBJECT_PER_LINE}" if line.strip() in (b"[", b"{") else ""
        if not any(ending in where for ending in RECORD_ENDINGS):
            hint += "; if the file has no records, exclude it with `data.pattern`"
        return CorruptRecordError(f"{where}: not JSON ({error}){hint}")


def encoding_problem(text: str, where: str) -> CorruptRecordError | None:
    r"""Why no tokenizer can encode a text, or None.

    JSON may contain half a surrogate pair (`\ud800`), which is not a character: Python reads it but cannot encode it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return CorruptRecordError(f"{where}: half a surrogate pair at character {error.start}")
    return None


def _parquet(file: IO[bytes], entry: FileEntry, key: str) -> Iterator[_Read]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError("`data.format: Parquet` needs pyarrow: install `meshwright[data]`") from error
    name = entry.name
    try:
        table = parquet.ParquetFile(file)
        if key not in table.schema_arrow.names:
            columns = ", ".join(table.schema_arrow.names)
            raise DataError(f"{name} has no column `{key}`: set `data.field` to one of {columns}")
        rows = (cell for batch in table.iter_batches(batch_size=_PARQUET_ROWS, columns=[key]) for cell in batch[0])
        for row, cell in enumerate(rows, start=1):
            yield _cell(cell, f"{name}: row {row}", key), row / table.metadata.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{name} is not a complete Parquet file: {error} (exclude other files with `data.pattern`)"
        ) from _unless_damage(error)


def _cell(cell: Any, where: str, key: str) -> str | CorruptRecordError:
    try:
        # Not every writer checks that a column of text is UTF-8, and a column may also have bytes.
        value = cell.as_py()
        text = value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError as error:
        return CorruptRecordError(f"{where}: not UTF-8 at byte {error.start}")
    return text if isinstance(text, str) else CorruptRecordError(f"{where} has no text in `{key}`")
