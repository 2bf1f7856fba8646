"""Putting one group into bins so that it is split as little as possible: workers of a block into nodes."""

from __future__ import annotations

from collections.abc import MutableMapping


def best_fit(size: int, free: MutableMapping[str, int]) -> list[tuple[str, int]]:
    """Pieces of one group, as (bin, amount), taken out of `free`.

    The tightest bin that holds it whole; where none does, the roomiest bin and then the rest in the same way. Tight
    fits come first so that bins that are still whole stay whole. Equal bins are taken by name.

    Raises:
        ValueError: there is not enough room in all bins together.
    """
    if size > sum(free.values()):
        raise ValueError(f"a group of {size} does not fit")
    pieces: list[tuple[str, int]] = []
    while size:
        large_enough = [(space, name) for name, space in free.items() if space >= size]
        name = min(large_enough)[1] if large_enough else min((-space, name) for name, space in free.items())[1]
        amount = min(size, free[name])
        pieces.append((name, amount))
        free[name] -= amount
        size -= amount
    return pieces
