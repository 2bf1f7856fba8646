"""Reads documents: a text file, a line of JSON Lines or a row of Parquet is one document.

A record that cannot be read is never skipped silently: it ends the reading, or is counted and reported.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import IO, Any

from meshwright.api.data import DataFormat, OnCorrupt
from meshwright.data.errors import CorruptRecordError, DataError
from meshwright.data.files import Directory, FileEntry

MAX_EXAMPLES = 20
"""Number of skipped records that are reported one by one."""
_PARQUET_ROWS = 1024
_GZIP = ".gz"
_GZIP_INSTEAD = "decompress it, or compress it with gzip"
_BINARY_FORMATS = {
    b"\x1f\x8b": ("compressed with gzip", "end its name in `.gz`"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", _GZIP_INSTEAD),
    b"\xfd7zXZ": ("compressed with xz", _GZIP_INSTEAD),
    b"BZh": ("compressed with bzip2", _GZIP_INSTEAD),
    b"PK\x03\x04": ("a zip archive", "unpack it"),
    b"PAR1": ("a Parquet file", "use `data.format: Parquet`"),
    b"\xff\xfe": ("UTF-16", "convert it to UTF-8"),
    b"\xfe\xff": ("UTF-16", "convert it to UTF-8"),
}
"""The first bytes of files without lines of UTF-8: what the file is, and what to do. No line of JSON begins so."""
_MAGIC = 6
COMPRESSED_ENDINGS = (_GZIP, ".zst", ".xz", ".bz2", ".zip", ".parquet")
"""Ends of the names of files that are not text."""
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
    directory: Directory, entry: FileEntry, kind: DataFormat, key: str, on_corrupt: OnCorrupt, skipped: SkippedRecords
) -> Iterator[str]:
    """The documents of one file, in order, without empty ones.

    Args:
        directory: where the file is.
        entry: the file.
        kind: its format, any but `Tokens`.
        key: the field or column that holds the text; not used for text files.
        on_corrupt: what to do with a record that cannot be read.
        skipped: what was passed over is added here.

    Raises:
        CorruptRecordError: a record cannot be read, and `on_corrupt` is `Fail`.
        DataError: the file is not of this format at all.
    """
    readers = {DataFormat.TEXT: _text, DataFormat.JSON_LINES: _json_lines, DataFormat.PARQUET: _parquet}
    with directory.open(entry.name) as file:
        for found in readers[kind](file, entry.name, key):
            if isinstance(found, CorruptRecordError):
                if on_corrupt is OnCorrupt.FAIL:
                    raise found
                skipped.add(str(found))
            elif found:
                yield found


def _text(file: IO[bytes], name: str, key: str) -> Iterator[str | CorruptRecordError]:
    try:
        yield file.read().decode()
    except UnicodeDecodeError as error:
        found = _binary_format(error.object)
        yield CorruptRecordError(f"{name}: not UTF-8 at byte {error.start}{f' (it is {found[0]})' if found else ''}")


def _json_lines(file: IO[bytes], name: str, key: str) -> Iterator[str | CorruptRecordError]:
    return (
        line if isinstance(line, CorruptRecordError) else _line(line, where, key) for where, line in lines(file, name)
    )


def lines(file: IO[bytes], name: str) -> Iterator[tuple[str, bytes | CorruptRecordError]]:
    """The non-empty lines of a file, with file name and line number. Decompresses if `name` ends in `.gz`.

    A file that does not contain lines of text, such as one compressed with zstd, is one corrupt record.

    Raises:
        DataError: it cannot be read to its end.
    """
    try:
        head = file.read(_MAGIC)
        file.seek(0)
        if not name.endswith(_GZIP) and (found := _binary_format(head)) is not None:
            yield name, CorruptRecordError(f"{name} is {found[0]}: {found[1]}")
            return
        with gzip.open(file) if name.endswith(_GZIP) else nullcontext(file) as content:
            for number, line in enumerate(content, start=1):
                if line.strip():
                    yield f"{name}:{number}", line
    except (OSError, EOFError, zlib.error) as error:
        # A broken archive loses every line after the break, not only one record.
        raise DataError(f"{name} cannot be read to its end: {error}") from error


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


def _parquet(file: IO[bytes], name: str, key: str) -> Iterator[str | CorruptRecordError]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError("`data.format: Parquet` needs pyarrow: install `meshwright[data]`") from error
    try:
        table = parquet.ParquetFile(file)
        if key not in table.schema_arrow.names:
            columns = ", ".join(table.schema_arrow.names)
            raise DataError(f"{name} has no column `{key}`: set `data.field` to one of {columns}")
        rows = (cell for batch in table.iter_batches(batch_size=_PARQUET_ROWS, columns=[key]) for cell in batch[0])
        for row, cell in enumerate(rows, start=1):
            yield _cell(cell, f"{name}: row {row}", key)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{name} is not a complete Parquet file: {error} (exclude other files with `data.pattern`)"
        ) from error


def _cell(cell: Any, where: str, key: str) -> str | CorruptRecordError:
    try:
        # Not every writer checks that a column of text is UTF-8, and a column may also have bytes.
        value = cell.as_py()
        text = value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError as error:
        return CorruptRecordError(f"{where}: not UTF-8 at byte {error.start}")
    return text if isinstance(text, str) else CorruptRecordError(f"{where} has no text in `{key}`")
