"""A queue of keys: each waits at most once, is worked on by one worker at a time, and is retried with back-off."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from meshwright.local.client import ApiError

logger = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)

_FIRST_RETRY = 0.05
_LAST_RETRY = 15.0


class WorkQueue(Generic[Key]):
    """Calls `work(key)` for every key added, again if it was added meanwhile.

    `work` returns None when done, or the seconds after which it wants the key again. When it raises, the key comes
    back after a pause that doubles with each failure in a row.
    """

    def __init__(self, name: str, work: Callable[[Key], Awaitable[float | None]], *, workers: int = 1) -> None:
        self._name = name
        self._work = work
        self._workers = workers
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._waiting: set[Key] = set()
        self._busy: set[Key] = set()
        self._again: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}

    def add(self, key: Key) -> None:
        """Have the key worked on soon."""
        if timer := self._timers.pop(key, None):
            timer.cancel()
        if key in self._busy:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._ready.put_nowait(key)

    def add_after(self, key: Key, seconds: float) -> None:
        """Have the key worked on after a time, unless it is added before."""
        if key not in self._timers and key not in self._waiting:
            self._timers[key] = asyncio.get_running_loop().call_later(seconds, self.add, key)

    async def run(self) -> None:
        """Work until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._workers):
                    group.create_task(self._worker())
        finally:
            for timer in self._timers.values():
                timer.cancel()

    async def _worker(self) -> None:
        while True:
            key = await self._ready.get()
            self._waiting.discard(key)
            self._busy.add(key)
            try:
                await self._once(key)
            finally:
                self._busy.discard(key)
            if key in self._again:
                self._again.discard(key)
                self.add(key)

    async def _once(self, key: Key) -> None:
        try:
            later = await self._work(key)
        except Exception as error:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            # A conflict is the ordinary outcome of two writers, and the retry settles it.
            expected = isinstance(error, ApiError) and error.status in (404, 409)
            logger.log(logging.DEBUG if expected else logging.WARNING, "%s: %s: %r", self._name, key, error)
            self.add_after(key, min(_LAST_RETRY, _FIRST_RETRY * 2 ** min(failures, 10)))
            return
        self._failures.pop(key, None)
        if later is not None:
            self.add_after(key, later)
