"""The recent changes of one resource, and how watchers follow them.

Watchers have no queues. Each holds a position in the one log of its resource and is woken when the log grows, so a
slow client costs nothing but its own position; when the log has moved past it, its watch ends with 410 and it lists
again, as with a real server.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, Literal

Change = Literal["ADDED", "MODIFIED", "DELETED"]


@dataclass(frozen=True, slots=True)
class Stored:
    """One state of an object: as a dict that nobody may change, and as JSON."""

    obj: dict[str, Any]
    body: bytes


@dataclass(frozen=True, slots=True)
class Event:
    """One change. For DELETED, `new` is the last state, carrying the revision of the deletion."""

    revision: int
    change: Change
    new: Stored
    old: Stored | None


class Overrun(Exception):
    """What was asked for is older than the log."""


class EventLog:
    """A bounded log of events in order of revision.

    Args:
        floor: newest revision of which nothing is known; a watch may start at it or after it.
        size: how many events are kept at least.
    """

    def __init__(self, floor: int, size: int) -> None:
        self.floor = floor
        self._size = size
        self._events: list[Event] = []
        self._base = 0  # position of _events[0] counted from the first event ever
        self._wakers: set[asyncio.Event] = set()

    @property
    def end(self) -> int:
        """The position after the newest event."""
        return self._base + len(self._events)

    def append(self, event: Event) -> None:
        """Add an event and wake all who follow."""
        self._events.append(event)
        if len(self._events) >= 2 * self._size:
            self.floor = self._events[self._size - 1].revision
            del self._events[: self._size]
            self._base += self._size
        for waker in self._wakers:
            waker.set()

    def position_after(self, revision: int) -> int:
        """Where to read on from to see everything later than `revision`.

        Raises:
            Overrun: events after `revision` may be missing.
        """
        if revision < self.floor:
            raise Overrun(f"too old resource version: {revision} ({self.floor})")
        return self._base + bisect_right(self._events, revision, key=lambda event: event.revision)

    def read(self, position: int, limit: int = 500) -> list[Event]:
        """The events from `position` on, at most `limit`.

        Raises:
            Overrun: the log has moved past `position`.
        """
        if position < self._base:
            raise Overrun(f"too old resource version: the watcher fell behind ({self.floor})")
        start = position - self._base
        return self._events[start : start + limit]

    async def wait(self, position: int, seconds: float) -> bool:
        """Wait until there is something at `position`; False when `seconds` passed first."""
        if position < self.end:
            return True
        waker = asyncio.Event()
        self._wakers.add(waker)
        try:
            async with asyncio.timeout(seconds):
                await waker.wait()
            return True
        except TimeoutError:
            return False
        finally:
            self._wakers.discard(waker)
