"""A corpus as one long row of tokens, read on demand, and its division into training and held-out documents.

In text files bytes are tokens: only file sizes are kept in memory, so a rank starts at once and the corpus may be
larger than memory. Every other format is tokenized into shards first (`tokenized_shards`), unless it already is shards.
The page cache speeds up repeated reads.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from meshwright.data.documents import COMPRESSED_ENDINGS
from meshwright.data.errors import DataError
from meshwright.data.files import Directory, FileEntry, join_uri
from meshwright.data.shards import Tokens, TokenShards
from meshwright.data.tokenizers import BYTE_SEPARATOR

log = logging.getLogger(__name__)

_SCAN_TOKENS = 1 << 20


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

    def __init__(self, directory: Directory, documents: Iterable[FileEntry]) -> None:
        self._directory = directory
        self._documents = [document for document in documents if document.size]
        if not self._documents:
            raise CorpusError("no text to train on: no file matches `data.pattern`, or all of them are empty")
        self._ends = np.cumsum([document.size + 1 for document in self._documents])
        if binary := [document.name for document in self._documents if document.name.endswith(COMPRESSED_ENDINGS)]:
            log.warning(
                "%d of %d files, such as %s, are compressed, and are trained on byte by byte as they are: decompress "
                "them, or exclude them with `data.pattern`",
                *(len(binary), len(self._documents), binary[0]),
            )

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
        raw = self._directory.read(document.name, offset, length)
        if len(raw) != length:
            raise CorpusError(
                f"{join_uri(self._directory.where, document.name)} became shorter during the run: the files of `data` "
                "must not change while a job runs"
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


class CorpusSlice:
    """The tokens `first` to `last - 1` of a corpus; contains only full documents."""

    def __init__(self, corpus: Corpus, first: int, last: int) -> None:
        self._corpus = corpus
        self._first = first
        self._last = last

    @property
    def separator(self) -> int:
        """See `Corpus.separator`."""
        return self._corpus.separator

    def __len__(self) -> int:
        return self._last - self._first

    @property
    def fingerprint(self) -> str:
        """See `Corpus.fingerprint`."""
        return hashlib.sha256(f"{self._corpus.fingerprint}/{self._first}/{self._last}".encode()).hexdigest()

    def documents(self, start: int, stop: int) -> list[int]:
        """See `Corpus.documents`."""
        return self._corpus.documents(self._first + start, self._first + stop)

    def tokens(self, start: int, stop: int) -> Tokens:
        """See `Corpus.tokens`."""
        return self._corpus.tokens(self._first + start, self._first + stop)


def split_held_out(corpus: Corpus, share: float) -> tuple[CorpusSlice, CorpusSlice]:
    """Split into training documents and held-out documents: the last ones, which are never trained on.

    About `share` of the tokens are held out, from a document boundary on.

    Raises:
        CorpusError: there is no document boundary there.
    """
    cut = int(len(corpus) * (1 - share))
    begin = _next_document(corpus, cut)
    if not 0 < begin < len(corpus):
        raise CorpusError(
            f"`data.heldOut: {share}` holds out no document, because none begins in the last {len(corpus) - cut} "
            "tokens: use a larger share, or more and shorter documents"
        )
    return CorpusSlice(corpus, 0, begin), CorpusSlice(corpus, begin, len(corpus))


def _next_document(corpus: Corpus, start: int) -> int:
    """Return where the first document at or after `start` begins; the end of the corpus if there is none."""
    for position in range(max(0, start - 1), len(corpus), _SCAN_TOKENS):
        separators = np.flatnonzero(
            corpus.tokens(position, min(position + _SCAN_TOKENS, len(corpus))) == corpus.separator
        )
        if len(separators):
            return position + int(separators[0]) + 1
    return len(corpus)
