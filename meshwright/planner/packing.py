"""Putting equal groups into bins so that few groups are split: the arithmetic of placement, on plain numbers.

The same two moves serve every level of the fabric (replicas into racks, blocks into NVLink domains, workers into
nodes). Which bins hold whole groups has a closed form, sum over bins of floor(room / size); only the groups that must
be split need a heuristic.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping


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


def share_whole(groups: int, capacity: Mapping[str, int]) -> dict[str, int]:
    """How many whole groups each bin gets: over the fewest bins, and evenly among those; never more than fit.

    `capacity` is in whole groups. One bin that holds all is chosen as tight as possible.
    """
    holding = [(space, name) for name, space in capacity.items() if space >= groups]
    if groups and holding:
        return {min(holding)[1]: groups}
    chosen: list[str] = []
    covered = 0
    for name in sorted(capacity, key=lambda n: (-capacity[n], n)):
        if covered >= groups or not capacity[name]:
            break
        chosen.append(name)
        covered += capacity[name]
    return _level(min(groups, covered), {name: capacity[name] for name in sorted(chosen)})


def _level(groups: int, capacity: Mapping[str, int]) -> dict[str, int]:
    """Even shares: small bins are filled, the others get the same number, the first of them one more."""
    shares: dict[str, int] = {}
    left = groups
    by_space = sorted(capacity, key=lambda n: (capacity[n], n))
    for position, name in enumerate(by_space):
        shares[name] = min(capacity[name], -(-left // (len(by_space) - position)))
        left -= shares[name]
    return {name: shares[name] for name in sorted(shares)}
