"""A corpus as one long row of tokens, read on demand.

In text files bytes are tokens: only file sizes are kept in memory, so a rank starts at once and the corpus may be
larger than memory. Every other format is tokenized into shards first (`tokenized_shards`), unless it already is shards.
The page cache speeds up repeated reads.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from meshwright.api.data import DataFormat, DataSource, DataSpec, Tokenizer
from meshwright.data.errors import DataError
from meshwright.data.files import FileEntry, Folder, LocalFolder, join_uri, open_folder
from meshwright.data.shards import Tokens, TokenShards, TokensManifest, read_manifest
from meshwright.data.tokenize import TextSource
from meshwright.data.tokenizers import BYTE_SEPARATOR
from meshwright_worker.data.token_cache import data_source, open_data_tokenizer, tokenized_shards

_MAX_NAMED = 5
"""Maximum number of files or directories in an error message."""
_EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


class CorpusError(DataError):
    """The corpus cannot be used. The message names the field and the fix."""


@contextmanager
def naming_corpus(path: str | None) -> Iterator[None]:
    """Make errors name the corpus of a mixture; without a mixture there is only one corpus."""
    try:
        yield
    except DataError as error:
        named = f"`data.mixture` with `path: {path}`"
        if path is None or named in str(error):
            raise
        raise type(error)(f"{named}: {error}") from error


class Corpus(Protocol):
    """Documents in a fixed order, each followed by the separator, addressed as one row of tokens."""

    @property
    def separator(self) -> int:
        """The token after each document."""

    def __len__(self) -> int:
        """Number of tokens in the entire row."""

    @property
    def fingerprint(self) -> str:
        """Hash that is equal if two machines, or two starts of a run, read the same row of tokens."""

    def documents(self, start: int, stop: int) -> list[int]:
        """Return the number of tokens of each document, including its separator, among the tokens at `start` to `stop -
        1`.

        Raises:
            DataError: they cannot be read.
        """

    def tokens(self, start: int, stop: int) -> Tokens:
        """Return the tokens at `start` to `stop - 1`, int64 [stop - start].

        Raises:
            DataError: they cannot be read.
        """


class TextCorpus:
    """Files whose bytes are the tokens.

    Raises:
        CorpusError: all documents are empty, or there are none.
    """

    separator = BYTE_SEPARATOR

    def __init__(self, folder: Folder, documents: Iterable[FileEntry]) -> None:
        self._folder = folder
        self._documents = [document for document in documents if document.size]
        if not self._documents:
            raise CorpusError("no text to train on: no file matches `data.pattern`, or all of them are empty")
        self._ends = np.cumsum([document.size + 1 for document in self._documents])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def fingerprint(self) -> str:
        """Hash of names and sizes."""
        lines = (f"{document.name}\0{document.size}\n" for document in self._documents)
        return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()

    def documents(self, start: int, stop: int) -> list[int]:
        """See `Corpus.documents`. Computed from file sizes: reads no file."""
        first, last = np.searchsorted(self._ends, [start, stop], side="right")
        ends = [end for end in self._ends[first:last].tolist() if end < stop]
        borders = [start, *ends, stop] if start < stop else []
        return [end - begin for begin, end in zip(borders, borders[1:], strict=False)]

    def tokens(self, start: int, stop: int) -> Tokens:
        """See `Corpus.tokens`."""
        row = np.full(stop - start, self.separator, dtype=np.int64)
        index = int(np.searchsorted(self._ends, start, side="right"))
        position = start
        while position < stop:
            document, end = self._documents[index], int(self._ends[index])
            begin = end - 1 - document.size
            length = min(stop, end - 1) - position
            if length > 0:
                row[position - start : position - start + length] = self._read(document, position - begin, length)
            position, index = end, index + 1
        return row

    def _read(self, document: FileEntry, offset: int, length: int) -> npt.NDArray[np.uint8]:
        with self._folder.open(document.name) as file:
            file.seek(offset)
            raw = file.read(length)
        if len(raw) != length:
            raise CorpusError(
                f"{join_uri(self._folder.where, document.name)} became shorter while it is trained on; `data` must not "
                "change during a run"
            )
        return np.frombuffer(raw, dtype=np.uint8)


class ShardCorpus(TokenShards):
    """Shards of tokens."""

    @property
    def separator(self) -> int:
        """See `Corpus.separator`."""
        return self.manifest.separator

    def documents(self, start: int, stop: int) -> list[int]:
        """See `Corpus.documents`."""
        ends = np.flatnonzero(self.tokens(start, stop) == self.separator) + 1
        borders = [0, *(int(end) for end in ends if end < stop - start), stop - start] if start < stop else []
        return [end - begin for begin, end in zip(borders, borders[1:], strict=False)]


def open_corpus(data: DataSpec, data_dir: str | None, path: str | None = None) -> Corpus:
    """Open the corpus that `data` names, or the mixture's corpus at `path`; `data_dir` is the root of the mounted
    volume.

    Raises:
        DataError: there is no volume, no file matches, or the corpus cannot be read.
    """
    if data.source is DataSource.PYTHON_STDLIB:
        library = LocalFolder(Path(sysconfig.get_path("stdlib")), _EXCLUDED_FOLDERS)
        return TextCorpus(library, (entry for entry in library.files() if entry.name.endswith(".py")))
    root = data_root(data, data_dir)
    folder = open_data_folder(data, data_dir, path)
    if data.format is DataFormat.TOKENS:
        shards = _open_shards(folder)
        expected = open_data_tokenizer(data, root).identity
        if shards.manifest.tokenizer != expected:
            raise CorpusError(
                f"{path or root} holds tokens of `{shards.manifest.tokenizer}`, not of `{expected}`: `data.tokenizer` "
                "and `data.tokenizerFile` must be what wrote them"
            )
        return shards
    source = data_source(data, folder, path)
    entries = matching_files(source)
    if data.format is DataFormat.TEXT and data.tokenizer is Tokenizer.BYTE:
        return TextCorpus(folder, entries)
    return ShardCorpus(tokenized_shards(source, open_data_tokenizer(data, root)))


def matching_files(source: TextSource) -> list[FileEntry]:
    """Return the files that match `data.pattern`.

    Raises:
        CorpusError: all of them are empty, or none matches; lists the existing files.
    """
    entries = source.files()
    if any(entry.size for entry in entries):
        return entries
    existing = [entry.name for entry in source.folder.files() if entry.size and entry.name != source.without]
    problem = f"`data.pattern: {source.pattern}` matches {'empty files alone' if entries else 'no file'}"
    if not existing:
        raise CorpusError(f"{problem}: there is none with any content")
    more = f" and {len(existing) - _MAX_NAMED} more" if len(existing) > _MAX_NAMED else ""
    raise CorpusError(f"{problem}; there are {', '.join(existing[:_MAX_NAMED])}{more}")


def read_tokens_manifest(folder: Folder) -> TokensManifest:
    """Read the manifest in the directory of a tokenized corpus.

    Raises:
        CorpusError: it is missing or cannot be read.
    """
    try:
        return read_manifest(folder)
    except DataError as error:
        raise CorpusError(f"`data.format: Tokens`: {error}") from error


def _open_shards(folder: Folder) -> ShardCorpus:
    try:
        return ShardCorpus(folder)
    except DataError as error:
        raise CorpusError(f"`data.format: Tokens`: {error}") from error


def open_data_folder(data: DataSpec, data_dir: str | None, path: str | None = None) -> Folder:
    """Open the directory of the corpus, or of the mixture's corpus at `path`.

    Raises:
        DataError: no volume is mounted, or the directory does not exist; lists the existing ones.
    """
    root = data_root(data, data_dir)
    try:
        return open_folder(join_uri(root, path) if path else root)
    except DataError as error:
        if data.uri is not None:
            raise
        parent = Path(root) if path else Path(root).parent
        existing = sorted(entry.name for entry in parent.iterdir() if entry.is_dir()) if parent.is_dir() else []
        field = f"`data.mixture` with `path: {path}`" if path else "`data.claimName`"
        raise CorpusError(f"{field}: {error}; folders there: {', '.join(existing[:_MAX_NAMED]) or 'none'}") from error


def data_root(data: DataSpec, data_dir: str | None) -> str:
    """Return the directory of the data, as a path or a URI.

    Raises:
        CorpusError: no volume is mounted.
    """
    if data.uri is not None:
        return data.uri
    if data_dir is None:
        raise CorpusError("`data.source: Files` needs `data.claimName` or `data.uri`: no data volume is mounted")
    return data_dir
