"""Formats and parses the ranks of a worker in `status.placement`: `4-5`, or `4` for a single rank."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.api.status import WorkerPlacement


def format_ranks(ranks: range) -> str:
    """Consecutive ranks as a string."""
    return str(ranks.start) if len(ranks) == 1 else f"{ranks.start}-{ranks.stop - 1}"


def parse_ranks(text: str) -> range | None:
    """The ranks of a string, or None if it is invalid."""
    first, _, last = text.partition("-")
    last = last or first
    if not (first.isdecimal() and last.isdecimal()) or int(last) < int(first):
        return None
    return range(int(first), int(last) + 1)


def in_rank_order(workers: Sequence[WorkerPlacement]) -> list[WorkerPlacement]:
    """The workers in the order of their ranks. Empty unless the ranks start at 0 and all workers have equally many."""
    read = [(ranks, entry) for entry in workers if (ranks := parse_ranks(entry.ranks)) is not None]
    ordered = sorted(read, key=lambda pair: pair[0].start)
    size = len(ordered[0][0]) if ordered else 0
    whole = all(ranks == range(slot * size, (slot + 1) * size) for slot, (ranks, _) in enumerate(ordered))
    return [entry for _, entry in ordered] if whole and len(read) == len(workers) else []
