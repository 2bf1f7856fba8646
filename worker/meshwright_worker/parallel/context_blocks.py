"""What attention between two slices of rows comes to: the rectangles and triangles of the score matrix that count.

A block is a stretch of queries against a stretch of keys, each of which is in one piece in memory. What a causal mask
or the borders between documents hide is in no block, so it costs nothing; inside a block every score counts, or the
lower triangle does, so no mask is ever stored. Pure: documents are read on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from meshwright.runs.context_slices import Slice, size

Documents = npt.NDArray[np.int64]
"""[batch, length of a row]: which document of its row each token belongs to; never less than before it."""


@dataclass(frozen=True, slots=True)
class Block:
    """Scores to compute, in indices of the two slices as they lie in memory."""

    rows: slice
    """Of the batch."""
    queries: slice
    keys: slice
    causal: bool
    """Whether a query sees only the keys up to its own; then there are as many keys as queries."""

    @property
    def scores(self) -> int:
        """Scores that count, of one row and head."""
        count: int = self.queries.stop - self.queries.start
        keys: int = self.keys.stop - self.keys.start
        return count * (count + 1) // 2 if self.causal else count * keys


_ALL_ROWS = slice(None)


def blocks_of(queries: Slice, keys: Slice, *, causal: bool, documents: Documents | None = None) -> list[Block]:
    """The blocks of a rank's queries against some rank's keys, those on the diagonal first.

    Two parts of a row are either the same stretch or do not meet, or one holds the other whole.
    """
    if documents is None:
        if causal and queries == keys:
            whole = slice(0, size(queries))
            return [Block(_ALL_ROWS, whole, whole, causal=True)]
        return _joined(_ALL_ROWS, list(_pairs(queries, keys, causal)), queries, keys)
    found: list[Block] = []
    for row, line in enumerate(documents):
        seen = _by_document(keys, line)
        pairs = [
            pair
            for document, wanted in _by_document(queries, line).items()
            for pair in _pairs(wanted, seen.get(document, []), causal)
        ]
        found += _joined(slice(row, row + 1), pairs, queries, keys)
    return _rows_joined(found)


_Pair = tuple[range, range, bool]
"""Positions of queries and of keys in the row, and whether the block is a triangle."""


def _pairs(queries: Sequence[range], keys: Sequence[range], causal: bool) -> Iterator[_Pair]:
    for wanted in queries:
        for seen in keys:
            if not causal:
                yield wanted, seen, False
                continue
            before = range(seen.start, min(seen.stop, wanted.start))
            if len(before):
                yield wanted, before, False
            if seen.start <= wanted.start < seen.stop:
                yield wanted, wanted, True


def _by_document(parts: Sequence[range], line: npt.NDArray[np.int64]) -> dict[int, list[range]]:
    """The parts, cut where a document ends, by document."""
    found: dict[int, list[range]] = {}
    for part in parts:
        borders = np.flatnonzero(np.diff(line[part.start : part.stop])) + part.start + 1
        ends = [part.start, *(int(border) for border in borders), part.stop]
        for first, last in zip(ends, ends[1:], strict=False):
            found.setdefault(int(line[first]), []).append(range(first, last))
    return found


def _joined(rows: slice, pairs: Sequence[_Pair], queries: Slice, keys: Slice) -> list[Block]:
    """Blocks in memory, with neighbours that make a larger block in one."""
    blocks = [Block(rows, _place(wanted, queries), _place(seen, keys), causal) for wanted, seen, causal in pairs]
    joined: list[Block] = []
    for block in sorted(blocks, key=lambda b: (not b.causal, b.queries.start, b.keys.start)):
        last = joined[-1] if joined else None
        if last is not None and not (last.causal or block.causal):
            if last.queries == block.queries and last.keys.stop == block.keys.start:
                joined[-1] = replace(last, keys=slice(last.keys.start, block.keys.stop))
                continue
            if last.keys == block.keys and last.queries.stop == block.queries.start:
                joined[-1] = replace(last, queries=slice(last.queries.start, block.queries.stop))
                continue
        joined.append(block)
    return joined


def _rows_joined(blocks: Sequence[Block]) -> list[Block]:
    """Equal blocks of consecutive rows in one; triangles first, so that every query meets its own key first of all."""
    joined: list[Block] = []
    for block in sorted(blocks, key=lambda b: (not b.causal, b.queries.start, b.keys.start, b.keys.stop, b.rows.start)):
        last = joined[-1] if joined else None
        if last is not None and replace(last, rows=block.rows) == block and last.rows.stop == block.rows.start:
            joined[-1] = replace(last, rows=slice(last.rows.start, block.rows.stop))
        else:
            joined.append(block)
    return joined


def _place(positions: range, part: Slice) -> slice:
    """Where positions of a row lie in a slice of it."""
    begin = 0
    for held in part:
        if held.start <= positions.start and positions.stop <= held.stop:
            first = begin + positions.start - held.start
            return slice(first, first + len(positions))
        begin += len(held)
    raise ValueError(f"the positions {positions} are in no part of {part}")
