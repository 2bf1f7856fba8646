"""Putting one group into bins so that it is split as little as possible: workers of a block into nodes."""

from __future__ import annotations

from collections.abc import MutableMapping


def take(size: int, room: MutableMapping[str, int]) -> list[tuple[str, int]]:
    """Pieces of one group, as (bin, amount), taken out of `room`.

    The tightest bin that holds it whole; where none does, the roomiest bin and then the rest in the same way. Tight
    fits come first so that bins that are still whole stay whole. Equal bins are taken by name.

    Raises:
        ValueError: there is not enough room in all bins together.
    """
    if size > sum(room.values()):
        raise ValueError(f"a group of {size} does not fit")
    pieces: list[tuple[str, int]] = []
    while size:
        holding = [(space, name) for name, space in room.items() if space >= size]
        name = min(holding)[1] if holding else min((-space, name) for name, space in room.items())[1]
        amount = min(size, room[name])
        pieces.append((name, amount))
        room[name] -= amount
        size -= amount
    return pieces
