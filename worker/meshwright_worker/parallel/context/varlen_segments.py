"""The attention blocks of packed documents as segments of one call of a varlen kernel.

A varlen kernel (FlashAttention's, arXiv 2307.08691) takes the tokens of all rows one after the other and the borders of
segments: queries of segment i attend to keys of segment i only. One launch so computes all documents, and no pair of
tokens of different documents. Pure: lists of ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright_worker.parallel.context.attention_blocks import AttentionBlock


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of queries and the run of keys that they attend to, as indices into the tokens of all rows."""

    queries: range
    keys: range


@dataclass(frozen=True, slots=True)
class VarlenBlocks:
    """The segments of one call. No query is in two of them; keys may be."""

    segments: tuple[Segment, ...]
    """In the order of their queries."""
    causal: bool
    """Whether the last query of a segment attends to all its keys, the one before to all but the last, and so on; a
    segment has then at least as many keys as queries.
    """

    @property
    def scores(self) -> int:
        """Number of scores that the call computes, of one head."""
        return sum(block.scores for block in self.local_blocks())

    def local_blocks(self) -> Iterator[AttentionBlock]:
        """Yield the blocks of the segments, where queries and keys of one segment follow those of the last."""
        first_query = first_key = 0
        for segment in self.segments:
            queries = slice(first_query, first_query + len(segment.queries))
            keys = slice(first_key, first_key + len(segment.keys))
            diagonal = keys.stop - len(segment.queries) if self.causal else keys.stop
            if diagonal > keys.start:
                yield AttentionBlock(_ONLY_ROW, queries, slice(keys.start, diagonal), causal=False)
            if self.causal:
                yield AttentionBlock(_ONLY_ROW, queries, slice(diagonal, keys.stop), causal=True)
            first_query, first_key = queries.stop, keys.stop


_ONLY_ROW = slice(0, 1)


def varlen_blocks(blocks: Sequence[AttentionBlock], queries: int, keys: int) -> list[VarlenBlocks]:
    """Return the calls that compute the blocks of rows with `queries` and `keys` tokens here: causal ones first.

    A triangle and the rectangle just before it make one segment.
    """
    triangles: list[Segment] = []
    rectangles: dict[tuple[int, int, int], Segment] = {}
    for block in blocks:
        for row in range(block.rows.start, block.rows.stop):
            segment = Segment(_of_row(block.queries, row * queries), _of_row(block.keys, row * keys))
            if block.causal:
                triangles.append(segment)
            else:
                rectangles[segment.queries.start, segment.queries.stop, segment.keys.stop] = segment
    joined = []
    for triangle in triangles:
        before = rectangles.pop((triangle.queries.start, triangle.queries.stop, triangle.keys.start), triangle)
        joined.append(Segment(triangle.queries, range(before.keys.start, triangle.keys.stop)))
    kinds = ((joined, True), (list(rectangles.values()), False))
    return [
        VarlenBlocks(tuple(sorted(segments, key=lambda s: s.queries.start)), causal)
        for segments, causal in kinds
        if segments
    ]


def _of_row(part: slice, first: int) -> range:
    return range(first + part.start, first + part.stop)
