"""The attention blocks between two slices of rows: the rectangles and triangles of the score matrix that are not
masked.

A block is a range of queries against a range of keys, each contiguous in memory. Scores that the causal mask or
document borders hide are in no block, so they cost nothing. Inside a block every score is used, or the lower triangle,
so no mask is ever stored. Pure: documents are read on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from meshwright.sequence_sharding import TokenSlice, size

Documents = npt.NDArray[np.int64]
"""[batch, length of a row]: the document of each token in its row; never decreasing."""


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Scores to compute, as index ranges into the memory of the two slices."""

    rows: slice
    """Rows of the batch."""
    queries: slice
    keys: slice
    causal: bool
    """Whether a query attends only to the keys up to its own; there are then as many keys as queries."""

    @property
    def scores(self) -> int:
        """Number of scores to compute, of one row and head."""
        count: int = self.queries.stop - self.queries.start
        keys: int = self.keys.stop - self.keys.start
        return count * (count + 1) // 2 if self.causal else count * keys


_ALL_ROWS = slice(None)


def blocks_of(
    queries: TokenSlice, keys: TokenSlice, *, causal: bool, documents: Documents | None = None
) -> list[AttentionBlock]:
    """Return the blocks of a rank's queries against a rank's keys, those on the diagonal first.

    Two parts of a row are equal, disjoint, or one contains the other.
    """
    if documents is None:
        if causal and queries == keys:
            whole = slice(0, size(queries))
            return [AttentionBlock(_ALL_ROWS, whole, whole, causal=True)]
        return _merge_adjacent(_ALL_ROWS, list(_pairs(queries, keys, causal)), queries, keys)
    found: list[AttentionBlock] = []
    for row, documents_of_row in enumerate(documents):
        key_part = _by_document(keys, documents_of_row)
        pairs = [
            pair
            for document, query_part in _by_document(queries, documents_of_row).items()
            for pair in _pairs(query_part, key_part.get(document, []), causal)
        ]
        found += _merge_adjacent(slice(row, row + 1), pairs, queries, keys)
    return _merge_rows(found)


_Pair = tuple[range, range, bool]
"""Positions of queries and of keys in the row, and whether the block is a triangle."""


def _pairs(queries: Sequence[range], keys: Sequence[range], causal: bool) -> Iterator[_Pair]:
    for query_part in queries:
        for key_part in keys:
            if not causal:
                yield query_part, key_part, False
                continue
            before = range(key_part.start, min(key_part.stop, query_part.start))
            if len(before):
                yield query_part, before, False
            if key_part.start <= query_part.start < key_part.stop:
                yield query_part, query_part, True


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
        AttentionBlock(rows, _local_slice(query_part, queries), _local_slice(key_part, keys), causal)
        for query_part, key_part, causal in pairs
    ]
    merged: list[AttentionBlock] = []
    for block in sorted(blocks, key=lambda b: (not b.causal, b.queries.start, b.keys.start)):
        last = merged[-1] if merged else None
        if last is not None and not (last.causal or block.causal):
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
    for block in sorted(blocks, key=lambda b: (not b.causal, b.queries.start, b.keys.start, b.keys.stop, b.rows.start)):
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
