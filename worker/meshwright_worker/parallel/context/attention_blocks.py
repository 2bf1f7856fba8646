"""The attention blocks between two slices of rows: the rectangles and triangles of the score matrix that are not
masked.

A block is a range of queries against a range of keys, each contiguous in memory. Scores that the causal mask, document
borders or a sliding window hide are in no block, so they cost nothing. Inside a block every score is used, or a
triangle, so no mask is ever stored. Pure: documents are read on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import numpy.typing as npt

from meshwright.sequence_sharding import TokenSlice, size

Documents = npt.NDArray[np.int64]
"""[batch, length of a row]: the document of each token in its row; never decreasing."""


class Shape(Enum):
    """Which scores of a block are used. Triangles have as many keys as queries."""

    LOWER = 0
    """Query i attends to keys 0 to i: the causal mask on the diagonal."""
    UPPER = 1
    """Query i attends to keys i and later: the oldest keys of a sliding window."""
    FULL = 2


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Scores to compute, as index ranges into the memory of the two slices."""

    rows: slice
    """Rows of the batch."""
    queries: slice
    keys: slice
    shape: Shape

    @property
    def scores(self) -> int:
        """Number of scores to compute, of one row and head."""
        count: int = self.queries.stop - self.queries.start
        keys: int = self.keys.stop - self.keys.start
        return count * keys if self.shape is Shape.FULL else count * (count + 1) // 2


_ALL_ROWS = slice(None)


def blocks_of(
    queries: TokenSlice,
    keys: TokenSlice,
    *,
    causal: bool,
    documents: Documents | None = None,
    window: int = 0,
) -> list[AttentionBlock]:
    """Return the blocks of a rank's queries against a rank's keys, those on the diagonal first.

    Two parts of a row are equal, disjoint, or one contains the other. `window` is the largest number of keys that a
    query attends to, its own among them, 0 for all; only with `causal`.
    """
    if documents is None:
        if causal and queries == keys and not window:
            whole = slice(0, size(queries))
            return [AttentionBlock(_ALL_ROWS, whole, whole, Shape.LOWER)]
        return _merge_adjacent(_ALL_ROWS, list(_pairs(queries, keys, causal, window)), queries, keys)
    found: list[AttentionBlock] = []
    for row, documents_of_row in enumerate(documents):
        key_part = _by_document(keys, documents_of_row)
        pairs = [
            pair
            for document, query_part in _by_document(queries, documents_of_row).items()
            for pair in _pairs(query_part, key_part.get(document, []), causal, window)
        ]
        found += _merge_adjacent(slice(row, row + 1), pairs, queries, keys)
    return _merge_rows(found)


_Pair = tuple[range, range, Shape]
"""Positions of queries and of keys in the row, and which of their scores are used."""


def _pairs(queries: Sequence[range], keys: Sequence[range], causal: bool, window: int) -> Iterator[_Pair]:
    for query_part in queries:
        for key_part in keys:
            if not causal:
                yield query_part, key_part, Shape.FULL
                continue
            yield from _earlier_keys(query_part, range(key_part.start, min(key_part.stop, query_part.start)), window)
            if key_part.start <= query_part.start < key_part.stop:
                yield from _diagonal(query_part, window)


def _diagonal(part: range, window: int) -> Iterator[_Pair]:
    """Queries against their own positions: one triangle, or one for each window's length of them."""
    step = window or len(part)
    for first in range(part.start, part.stop, step):
        chunk = range(first, min(first + step, part.stop))
        yield chunk, chunk, Shape.LOWER
        yield from _earlier_keys(chunk, range(part.start, first), window)


def _earlier_keys(queries: range, keys: range, window: int) -> Iterator[_Pair]:
    """Queries against keys that are all before them.

    The first queries may attend to all keys. Each later one attends to one key less: an upper triangle, and a rectangle
    of the keys after it.
    """
    whole = range(queries.start, min(queries.stop, keys.start + window) if window else queries.stop)
    if len(whole) and len(keys):
        yield whole, keys, Shape.FULL
    later = range(max(queries.start, keys.start + window), min(queries.stop, keys.stop + window - 1))
    if not window or not len(later):
        return
    corner = range(later.start - window + 1, later.stop - window + 1)
    yield later, corner, Shape.UPPER
    if corner.stop < keys.stop:
        yield later, range(corner.stop, keys.stop), Shape.FULL


def _by_document(parts: Sequence[range], documents_of_row: npt.NDArray[np.int64]) -> dict[int, list[range]]:
    """Split the parts at document borders; return them by document."""
    found: dict[int, list[range]] = {}
    for part in parts:
        borders = np.flatnonzero(np.diff(documents_of_row[part.start : part.stop])) + part.start + 1
        ends = [part.start, *(int(border) for border in borders), part.stop]
        for first, last in zip(ends, ends[1:], strict=False):
            found.setdefault(int(documents_of_row[first]), []).append(range(first, last))
    return found


def _merge_adjacent(rows: slice, pairs: Sequence[_Pair], queries: TokenSlice, keys: TokenSlice) -> list[AttentionBlock]:
    """Convert to blocks in memory; merge neighbors that form a larger block."""
    blocks = [
        AttentionBlock(rows, _local_slice(query_part, queries), _local_slice(key_part, keys), shape)
        for query_part, key_part, shape in pairs
    ]
    merged: list[AttentionBlock] = []
    for block in sorted(blocks, key=lambda b: (b.shape.value, b.queries.start, b.keys.start)):
        last = merged[-1] if merged else None
        if last is not None and last.shape is block.shape is Shape.FULL:
            if last.queries == block.queries and last.keys.stop == block.keys.start:
                merged[-1] = replace(last, keys=slice(last.keys.start, block.keys.stop))
                continue
            if last.keys == block.keys and last.queries.stop == block.queries.start:
                merged[-1] = replace(last, queries=slice(last.queries.start, block.queries.stop))
                continue
        merged.append(block)
    return merged


def _merge_rows(blocks: Sequence[AttentionBlock]) -> list[AttentionBlock]:
    """Merge equal blocks of consecutive rows; triangles first, so that every query starts with its own key."""
    merged: list[AttentionBlock] = []
    for block in sorted(
        blocks, key=lambda b: (b.shape.value, b.queries.start, b.keys.start, b.keys.stop, b.rows.start)
    ):
        last = merged[-1] if merged else None
        if last is not None and replace(last, rows=block.rows) == block and last.rows.stop == block.rows.start:
            merged[-1] = replace(last, rows=slice(last.rows.start, block.rows.stop))
        else:
            merged.append(block)
    return merged


def _local_slice(positions: range, part: TokenSlice) -> slice:
    """Return where positions of a row are in a slice of it."""
    begin = 0
    for piece in part:
        if piece.start <= positions.start and positions.stop <= piece.stop:
            first = begin + positions.start - piece.start
            return slice(first, first + len(positions))
        begin += len(piece)
    raise ValueError(f"the positions {positions} are in no part of {part}")
