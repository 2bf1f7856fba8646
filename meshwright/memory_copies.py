"""Copies of training state in a peer's host memory (`recovery.copyEverySteps`): who has whose, what they survive. Pure.

Every k steps each rank copies its state, for itself and for one peer. On a loss all ranks go back to the newest step of
which every rank's state is still there, and a new rank gets its state from the peer. All peers are the same distance
away in rank order, so that one number says where every copy is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.protocol.messages import HeldState

VERSIONS = 2
"""Steps of which a rank has copies: while one is made, the one before must be complete on all ranks."""
_MAX_TRIED = 16
"""Distances that are tried: each looks at all ranks."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank runs. Empty strings are not known."""

    worker: int
    node: str = ""
    domain: str = ""
    rack: str = ""


def choose_shift(places: Sequence[RankPlace]) -> int:
    """Return the distance to the peer with which most copies are on another worker, then node, rack and domain.

    0 for a single rank, which has no peer. `places` is by rank.
    """
    world = len(places)

    def apart(shift: int) -> tuple[int, ...]:
        pairs = [(places[rank], places[(rank + shift) % world]) for rank in range(world)]
        return tuple(
            sum(_differs(level, one, other) for one, other in pairs)
            for level in ((lambda place: place.worker), *_KNOWN_LEVELS)
        )

    largest = max(Counter(place.worker for place in places).values())
    shifts = range(largest, world, largest) or range(1, world)
    tried = shifts[:: -(-len(shifts) // _MAX_TRIED) or 1]
    return max(tried, key=lambda shift: (apart(shift), -shift), default=0)


def describe_survived(places: Sequence[RankPlace], shift: int) -> str:
    """Describe which losses the copies survive, such as `the loss of any worker, node or rack`."""
    levels: dict[str, Callable[[RankPlace], object]] = {
        "worker": lambda place: place.worker,
        "node": lambda place: place.node,
        "rack": lambda place: place.rack,
        "NVLink domain": lambda place: place.domain,
    }
    survived = ["rank"] * (shift > 0) + [name for name, level in levels.items() if _survives(places, shift, level)]
    if not survived:
        return "no loss"
    first, last = survived[:-1], survived[-1]
    return f"the loss of any {', '.join(first)} or {last}" if first else f"the loss of any {last}"


def find_copies(world: int, held: Mapping[int, HeldState]) -> tuple[int, dict[int, int]] | None:
    """Find the newest step of which every rank's state is left: the step, and rank without its own -> who has its copy.

    None if there is none. At least one rank then has its own.
    """
    holders: dict[int, dict[int, list[int]]] = {}
    for rank, state in sorted(held.items()):
        for copy in state.copies or ():
            holders.setdefault(copy.step, {}).setdefault(copy.rank, []).append(rank)
    for step in sorted(holders, reverse=True):
        found = holders[step]
        own = {rank for rank, ranks in found.items() if rank in ranks}
        if own and all(rank in found for rank in range(world)):
            return step, {rank: found[rank][0] for rank in range(world) if rank not in own}
    return None


def format_holders(holders: Mapping[int, int]) -> str:
    """Format rank -> the rank that has its copy, such as `3:1,4:2`."""
    return ",".join(f"{rank}:{holder}" for rank, holder in sorted(holders.items()))


def parse_holders(text: str) -> dict[int, int]:
    """Parse what `format_holders` returned; leave out what is not valid."""
    pairs = (part.partition(":") for part in text.split(","))
    return {int(rank): int(holder) for rank, _, holder in pairs if rank.isdigit() and holder.isdigit()}


def copies_bytes(state_bytes: float) -> float:
    """Return the bytes of host memory that the copies of a rank take, given those of its parameters and moments."""
    return 2 * VERSIONS * state_bytes


_KNOWN_LEVELS: tuple[Callable[[RankPlace], object], ...] = (
    lambda place: place.node,
    lambda place: place.rack,
    lambda place: place.domain,
)


def _differs(level: Callable[[RankPlace], object], one: RankPlace, other: RankPlace) -> bool:
    values = level(one), level(other)
    return "" not in values and values[0] != values[1]


def _survives(places: Sequence[RankPlace], shift: int, level: Callable[[RankPlace], object]) -> bool:
    """Whether every state is left if all ranks at one place of a level are lost. A level of one place is not known."""
    world = len(places)
    return shift > 0 and all(_differs(level, places[rank], places[(rank + shift) % world]) for rank in range(world))
