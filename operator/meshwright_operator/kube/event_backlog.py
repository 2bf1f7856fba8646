"""Events that wait to be posted: bounded, oldest first, and one of a job at a time, so that they stay in order."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from datetime import datetime

from meshwright_operator.kube.job_event import JobEvent

MOST_WAITING = 1024


@dataclass(frozen=True, slots=True)
class QueuedEvent:
    """An event in the backlog, with the fields of the job that the Event object needs."""

    namespace: str
    name: str
    uid: str
    event: JobEvent
    moment: datetime


class EventBacklog:
    """The events that wait. Used from one event loop only."""

    def __init__(self, most: int = MOST_WAITING) -> None:
        self._most = most
        self._waiting: dict[int, QueuedEvent] = {}
        self._of_job: Counter[str] = Counter()
        self._busy: set[str] = set()
        """Jobs of which an event is being posted."""
        self._number = 0
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """The number of events that wait."""
        return len(self._waiting)

    def put(self, queued: QueuedEvent) -> QueuedEvent | None:
        """Add an event. If there are too many, return an older one that was dropped for it.

        That is the job's own oldest one, so that a job with many events costs the others none; else the oldest of all.
        """
        dropped = None
        if len(self._waiting) >= self._most:
            own = self._of_job[queued.uid] > 0
            oldest = next(n for n, event in self._waiting.items() if not own or event.uid == queued.uid)
            dropped = self._remove(oldest)
        self._number += 1
        self._waiting[self._number] = queued
        self._of_job[queued.uid] += 1
        self._changed.set()
        return dropped

    def take(self) -> QueuedEvent | None:
        """The oldest event of a job of which none is being posted; None without one. Call `done` when it is posted."""
        number = next((n for n, event in self._waiting.items() if event.uid not in self._busy), None)
        if number is None:
            return None
        queued = self._remove(number)
        self._busy.add(queued.uid)
        return queued

    async def wait(self) -> QueuedEvent:
        """The same, as soon as there is one."""
        while (queued := self.take()) is None:
            self._changed.clear()
            await self._changed.wait()
        return queued

    def done(self, queued: QueuedEvent) -> None:
        """The event has been posted, or was given up. The next one of its job may be taken."""
        self._busy.discard(queued.uid)
        self._changed.set()

    async def empty(self) -> None:
        """Wait until no event waits or is being posted."""
        while self._waiting or self._busy:
            self._changed.clear()
            await self._changed.wait()

    def _remove(self, number: int) -> QueuedEvent:
        queued = self._waiting.pop(number)
        self._of_job[queued.uid] -= 1
        if not self._of_job[queued.uid]:
            del self._of_job[queued.uid]
        return queued
