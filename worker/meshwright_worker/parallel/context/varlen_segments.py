"""The attention blocks of packed documents as segments of one call of a varlen kernel.

A varlen kernel (FlashAttention's, arXiv 2307.08691) takes the tokens of all rows one after the other and the borders of
segments: queries of segment i attend to keys of segment i only. One launch so computes all documents, and no pair of
tokens of different documents. Pure: lists of ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright_worker.parallel.context.attention_blocks import AttentionBlock, Shape


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of queries and the run of keys that they attend to, as indices into the tokens of all rows."""

    queries: range
    keys: range
    """Both backward if tokens are in reverse order."""


@dataclass(frozen=True, slots=True)
class VarlenBlocks:
    """The segments of one call. No query is in two of them; keys may be."""

    segments: tuple[Segment, ...]
    """In the order of their queries, also if the tokens of each are in reverse order."""
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
                yield AttentionBlock(_ONLY_ROW, queries, slice(keys.start, diagonal), Shape.FULL)
            if self.causal:
                yield AttentionBlock(_ONLY_ROW, queries, slice(diagonal, keys.stop), Shape.LOWER)
            first_query, first_key = queries.stop, keys.stop


_ONLY_ROW = slice(0, 1)


def varlen_blocks(blocks: Sequence[AttentionBlock], queries: int, keys: int) -> list[VarlenBlocks]:
    """Return the calls that compute the blocks of rows with `queries` and `keys` tokens here: causal ones first.

    A lower triangle and the rectangle just before it make one segment. So do an upper triangle and the rectangle just
    after it: with tokens in reverse order they are the same.
    """
    lower: list[Segment] = []
    upper: list[Segment] = []
    rectangles: list[Segment] = []
    found = {Shape.LOWER: lower, Shape.UPPER: upper, Shape.FULL: rectangles}
    for block in blocks:
        for row in range(block.rows.start, block.rows.stop):
            segment = Segment(_of_row(block.queries, row * queries), _of_row(block.keys, row * keys))
            found[block.shape].append(segment)
    by_end = {(part.queries, part.keys.stop): part for part in rectangles}
    lower = [_join(triangle, by_end.pop((triangle.queries, triangle.keys.start), None)) for triangle in lower]
    by_start = {(part.queries, part.keys.start): part for part in by_end.values()}
    upper = [_join(triangle, by_start.pop((triangle.queries, triangle.keys.stop), None)) for triangle in upper]
    reverse = [Segment(part.queries[::-1], part.keys[::-1]) for part in upper]
    kinds = ((lower, True), (reverse, True), (list(by_start.values()), False))
    return [VarlenBlocks(call, causal) for segments, causal in kinds for call in _calls(segments)]


def _join(triangle: Segment, beside: Segment | None) -> Segment:
    """A triangle with the rectangle of keys beside it, if there is one."""
    if beside is None:
        return triangle
    keys = range(min(triangle.keys.start, beside.keys.start), max(triangle.keys.stop, beside.keys.stop))
    return Segment(triangle.queries, keys)


def _calls(segments: Sequence[Segment]) -> list[tuple[Segment, ...]]:
    """Divide segments into as few calls as possible such that no query is in two segments of a call."""
    calls: list[list[Segment]] = []
    for segment in sorted(segments, key=lambda s: min(s.queries)):
        free = (call for call in calls if max(call[-1].queries) < min(segment.queries))
        call = next(free, None)
        if call is None:
            calls.append([segment])
        else:
            call.append(segment)
    return [tuple(call) for call in calls]


def _of_row(part: slice, first: int) -> range:
    return range(first + part.start, first + part.stop)
