"""Tokenizes files into shards, in the order of the file names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from meshwright.api.data import DataFormat, OnCorrupt
from meshwright.data.documents import SkippedRecords, documents
from meshwright.data.errors import DataError
from meshwright.data.files import Directory, FileEntry, matching_files
from meshwright.data.shards import SHARD_TOKENS, ShardWriter, TokensManifest
from meshwright.data.tokenizers import Tokenizer

_BATCH = 256


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

    def files(self) -> list[FileEntry]:
        """The files to read, by name.

        Raises:
            DataError: the directory, or one of them, cannot be read.
        """
        return [entry for entry in matching_files(self.directory, self.pattern) if entry.name != self.without]


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of tokenizing."""

    file: str
    files: int
    """Files done, of `of`."""
    of: int
    skipped: SkippedRecords = field(default_factory=SkippedRecords)


def tokenize(
    source: TextSource,
    tokenizer: Tokenizer,
    target: Path,
    report_progress: Callable[[Progress], None] = lambda _: None,
    shard: int = SHARD_TOKENS,
) -> tuple[TokensManifest, SkippedRecords]:
    """Write the tokens of every matching file to `target`. Returns the manifest and the skipped records.

    Raises:
        CorruptRecordError: a record cannot be read and is not to be skipped.
        DataError: nothing matches, a file cannot be read, or `target` holds tokens already.
    """
    # Some programs write an empty file to mark a directory as complete.
    entries = [entry for entry in source.files() if entry.size]
    if not entries:
        raise DataError(f"no file matches `data.pattern: {source.pattern}`, or all matching files are empty")
    writer = ShardWriter(target, tokenizer.identity, tokenizer.vocabulary, tokenizer.separator, shard)
    skipped = SkippedRecords()
    for number, entry in enumerate(entries):
        report_progress(Progress(entry.name, number, len(entries), skipped))
        texts = documents(source.directory, entry, source.kind, source.key, source.on_corrupt, skipped)
        while batch := list(islice(texts, _BATCH)):
            writer.add(_not_empty(tokenizer.encode(batch, special=False)))
    manifest = writer.close(skipped.count)
    report_progress(Progress("", len(entries), len(entries), skipped))
    return manifest, skipped


def _not_empty(documents: list[list[int]]) -> Iterator[list[int]]:
    return (tokens for tokens in documents if tokens)
