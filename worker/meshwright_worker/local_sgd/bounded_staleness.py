"""Orders reads and writes of a server's parameters so that no gradient is staler than a bound. Pure.

A gradient's staleness is the number of updates between reading the parameters that it was computed from and applying
it. Readers are stored in the order in which they read. The k-th of them (from 0) can stay within the bound if all
before it write first and

    updates so far + k - updates when it read <= bound.

This invariant is maintained for all readers: a read waits until its place in the order is at most the bound, and a
write waits if it would violate the invariant for an earlier reader. The first reader's write never waits, so there is
no deadlock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Event:
    """A completed read or write."""

    kind: Literal["read", "write"]
    island: int
    staleness: int = 0
    """Of a write's gradient, in updates."""


class StalenessGate:
    """The order of a server's events.

    Args:
        bound: largest staleness, at least 0.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._updates = 0
        self._readers: dict[int, int] = {}
        self.events: list[Event] = []
        """All events so far, in order."""

    def may_read(self, island: int) -> bool:
        """Return whether the island may read now."""
        return island not in self._readers and len(self._readers) <= self._bound

    def may_write(self, island: int) -> bool:
        """Return whether the island's gradient may be applied now."""
        after = self._updates + 1
        for place, (reader, read) in enumerate(self._readers.items()):
            if reader == island:
                return True
            if after + place - read > self._bound:
                return False
        return False

    def read(self, island: int) -> Event:
        """Record that the island reads."""
        self._readers[island] = self._updates
        return self._record(Event("read", island))

    def write(self, island: int) -> Event:
        """Record that the island's gradient is applied."""
        staleness = self._updates - self._readers.pop(island)
        self._updates += 1
        return self._record(Event("write", island, staleness))

    def _record(self, event: Event) -> Event:
        self.events.append(event)
        return event


class ReplayOrder:
    """The same interface for a given order: the events passed to `add` that have not happened yet."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, int]] = []
        self.events: list[Event] = []
        """All events so far, in order."""

    def add(self, kind: str, island: int) -> None:
        """Append an event to the order."""
        self._waiting.append((kind, island))

    def may_read(self, island: int) -> bool:
        """Return whether it is the island's turn to read."""
        return self._waiting[:1] == [("read", island)]

    def may_write(self, island: int) -> bool:
        """Return whether it is the turn of the island's gradient."""
        return self._waiting[:1] == [("write", island)]

    def read(self, island: int) -> Event:
        """Record that the island reads."""
        return self._record(Event("read", island))

    def write(self, island: int) -> Event:
        """Record that the island's gradient is applied."""
        return self._record(Event("write", island))

    def _record(self, event: Event) -> Event:
        del self._waiting[0]
        self.events.append(event)
        return event
