"""Splits a corpus into training documents and held-out documents: the last ones, which are never trained on."""

from __future__ import annotations

import hashlib

import numpy as np

from meshwright.data.shards import Tokens
from meshwright_worker.data.corpus import Corpus, CorpusError

_SCAN_TOKENS = 1 << 20


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
    """Split into training and held-out parts. About `share` of the tokens are held out, from a document boundary on.

    Raises:
        CorpusError: there is no document boundary there.
    """
    cut = int(len(corpus) * (1 - share))
    begin = _next_document(corpus, cut)
    if not 0 < begin < len(corpus):
        raise CorpusError(
            f"`data.heldOut: {share}` holds out nothing: no document begins in the last {len(corpus) - cut} tokens; "
            "a larger share, or more and shorter documents, would"
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
