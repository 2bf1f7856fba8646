"""Tokenizes files into shards, in the order of the file names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from meshwright.api.data import DataFormat, OnCorrupt
from meshwright.data.documents import SkippedRecords, documents
from meshwright.data.errors import DataError
from meshwright.data.files import Directory, FileEntry, matching_files
from meshwright.data.shards import SHARD_TOKENS, ShardWriter, TokensManifest
from meshwright.data.tokenizers import Tokenizer

_BATCH = 256
"""Documents that are encoded at once."""
_BATCH_CHARACTERS = 1 << 22
"""Characters from which on a batch is complete: progress is reported after each, and its text is in memory."""


@dataclass(frozen=True, slots=True)
class TextSource:
    """What to read."""

    directory: Directory
    pattern: str = "**/*"
    kind: DataFormat = DataFormat.TEXT
    key: str = "text"
    """Field or column of the text, in records."""
    on_corrupt: OnCorrupt = OnCorrupt.FAIL
    without: str | None = None
    """Name of a file that is never read as text: the tokenizer's own."""

    def files(self, on_listed: Callable[[int], None] = lambda _: None) -> list[FileEntry]:
        """The files to read, by name. `on_listed` is called from time to time with the number of files found so far.

        Raises:
            DataError: the directory, or one of them, cannot be read.
        """
        found = matching_files(self.directory, self.pattern, on_listed)
        return [entry for entry in found if entry.name != self.without]


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of tokenizing."""

    file: str
    files: int
    """Files done, of `of`."""
    of: int
    skipped: SkippedRecords = field(default_factory=SkippedRecords)
    bytes: int = 0
    """Bytes of the files that are done, of `of_bytes`."""
    of_bytes: int = 0


def tokenize(
    source: TextSource,
    tokenizer: Tokenizer,
    target: Path,
    report_progress: Callable[[Progress], None] = lambda _: None,
    shard: int = SHARD_TOKENS,
    files: Sequence[FileEntry] | None = None,
) -> tuple[TokensManifest, SkippedRecords]:
    """Write the tokens of every matching file to `target`. Returns the manifest and the skipped records.

    Args:
        source: what to read.
        tokenizer: how to convert it.
        target: a new or empty directory.
        report_progress: called after each batch of documents.
        shard: tokens of a shard.
        files: the files of `source`, if they are listed already.

    Raises:
        CorruptRecordError: a record cannot be read and is not to be skipped.
        DataError: nothing matches, a file cannot be read, or `target` holds tokens already.
    """
    # Some programs write an empty file to mark a directory as complete.
    entries = [entry for entry in (source.files() if files is None else files) if entry.size]
    if not entries:
        raise DataError(f"no file matches `data.pattern: {source.pattern}`, or all matching files are empty")
    writer = ShardWriter(target, tokenizer.identity, tokenizer.vocabulary, tokenizer.separator, shard)
    skipped = SkippedRecords()
    position = _Position(entries, skipped, report_progress)
    for number, entry in enumerate(entries):
        position.begin(number)
        texts = documents(
            source.directory, entry, source.kind, source.key, source.on_corrupt, skipped, position.on_read
        )
        for batch in _batches(texts):
            writer.add(_not_empty(tokenizer.encode(batch, special=False)))
            position.report()
    if not writer.documents:
        raise DataError(_no_text(entries, skipped))
    manifest = writer.close(skipped.count)
    position.begin(len(entries))
    return manifest, skipped


def _no_text(entries: Sequence[FileEntry], skipped: SkippedRecords) -> str:
    """Why files with content have no document."""
    where = entries[0].name if len(entries) == 1 else f"{len(entries):,} files, such as {entries[0].name}"
    if skipped.count:
        records = "its only record" if skipped.count == 1 else f"all of {skipped.count:,} records"
        return f"no text in {where}: {records} cannot be read ({skipped.examples[0]}): correct them, or `data.format`"
    return f"no text in {where}: every record is empty"


class _Position:
    """How far the files are read. Reports it when a file begins, and while records are read that give no document."""

    def __init__(
        self, entries: Sequence[FileEntry], skipped: SkippedRecords, report_progress: Callable[[Progress], None]
    ) -> None:
        self._entries, self._skipped, self._report_progress = entries, skipped, report_progress
        self._starts = [0, *accumulate(entry.size for entry in entries)]
        self._number = self._bytes = self._reported = 0

    def begin(self, number: int) -> None:
        """The file of this number begins; with the number of files, all are done."""
        self._number, self._bytes = number, self._starts[number]
        self.report()

    def on_read(self, share: float) -> None:
        """This share of the current file is read."""
        self._bytes = self._starts[self._number] + int(share * self._entries[self._number].size)
        if self._bytes - self._reported >= _BATCH_CHARACTERS:
            self.report()

    def report(self) -> None:
        """Report how far the files are read."""
        self._reported, number, count = self._bytes, self._number, len(self._entries)
        name = self._entries[number].name if number < count else ""
        self._report_progress(Progress(name, number, count, self._skipped, self._bytes, self._starts[-1]))


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Texts to encode together."""
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if len(batch) == _BATCH or size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _not_empty(documents: list[list[int]]) -> Iterator[list[int]]:
    return (tokens for tokens in documents if tokens)
