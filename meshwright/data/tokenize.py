"""From files to shards of tokens, in the order of the files' names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from meshwright.api.data import DataFormat, OnCorrupt
from meshwright.data.errors import DataError
from meshwright.data.files import Folder, matching
from meshwright.data.records import Skipped, documents
from meshwright.data.shards import SHARD_TOKENS, ShardWriter, TokensManifest
from meshwright.data.tokenizers import Tokenizer

_BATCH = 256


@dataclass(frozen=True, slots=True)
class Source:
    """What to read."""

    folder: Folder
    pattern: str = "**/*"
    kind: DataFormat = DataFormat.TEXT
    key: str = "text"
    """Field or column of the text, in records."""
    on_corrupt: OnCorrupt = OnCorrupt.FAIL


@dataclass(frozen=True, slots=True)
class Progress:
    """How far tokenizing has come."""

    file: str
    files: int
    """Files done, of `of`."""
    of: int
    skipped: Skipped = field(default_factory=Skipped)


def tokenize(
    source: Source,
    tokenizer: Tokenizer,
    target: Path,
    tell: Callable[[Progress], None] = lambda _: None,
    shard: int = SHARD_TOKENS,
) -> tuple[TokensManifest, Skipped]:
    """Write the tokens of every matching file to `target`; what was skipped comes back with the manifest.

    Raises:
        CorruptRecordError: a record cannot be read and is not to be skipped.
        DataError: nothing matches, a file cannot be read, or `target` holds tokens already.
    """
    entries = list(matching(source.folder, source.pattern))
    if not entries:
        raise DataError(f"no file matches `data.pattern: {source.pattern}`")
    writer = ShardWriter(target, tokenizer.identity, tokenizer.vocabulary, tokenizer.separator, shard)
    skipped = Skipped()
    for number, entry in enumerate(entries):
        tell(Progress(entry.name, number, len(entries), skipped))
        texts = documents(source.folder, entry, source.kind, source.key, source.on_corrupt, skipped)
        while batch := list(islice(texts, _BATCH)):
            writer.add(_not_empty(tokenizer.encode(batch)))
    manifest = writer.close(skipped.count)
    tell(Progress("", len(entries), len(entries), skipped))
    return manifest, skipped


def _not_empty(documents: list[list[int]]) -> Iterator[list[int]]:
    return (tokens for tokens in documents if tokens)
