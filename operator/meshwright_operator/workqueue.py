"""A queue of keys: each key at most once in it, one run per key at a time, back-off per key.

A key that is added while it runs is run once more afterwards: no change is lost and none is processed twice at once.
Delayed adds are kept earliest-first per key. Used from one event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

FIRST_BACKOFF_SECONDS = 0.1
LONGEST_BACKOFF_SECONDS = 60.0

log = logging.getLogger(__name__)


class WorkQueue(Generic[Key]):
    """Keys that want to be reconciled."""

    def __init__(self) -> None:
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._queued: set[Key] = set()
        self._running: set[Key] = set()
        self._again: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}

    def __len__(self) -> int:
        """Keys that wait to run now; delayed ones not counted."""
        return len(self._queued) + len(self._again)

    def add(self, key: Key) -> None:
        """Runs the key soon: at once, or again after its current run."""
        if key in self._running:
            self._again.add(key)
        elif key not in self._queued:
            self._queued.add(key)
            self._ready.put_nowait(key)

    def add_after(self, key: Key, seconds: float) -> None:
        """Runs the key after `seconds`, or earlier if an earlier time was asked for already."""
        if seconds <= 0:
            self.add(key)
            return
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= loop.time() + seconds:
                return
            timer.cancel()
        self._timers[key] = loop.call_later(seconds, self._due, key)

    def forget(self, key: Key) -> None:
        """Drops the key's timer and failures: what it named is gone."""
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
        self._failures.pop(key, None)

    async def run(self, handler: Callable[[Key], Awaitable[None]]) -> None:
        """Takes keys for ever and runs `handler` on them; a handler that raises only delays its own key."""
        while True:
            key = await self._ready.get()
            self._queued.discard(key)
            self._running.add(key)
            try:
                await handler(key)
            except Exception:
                delay = self._backoff(key)
                log.exception("reconcile failed", extra={"job": key, "retry_seconds": round(delay, 1)})
                self.add_after(key, delay)
            else:
                self._failures.pop(key, None)
            finally:
                self._running.discard(key)
                if key in self._again:
                    self._again.discard(key)
                    self.add(key)

    async def run_many(self, workers: int, handler: Callable[[Key], Awaitable[None]]) -> None:
        """`workers` runs of `run` at the same time."""
        async with asyncio.TaskGroup() as group:
            for number in range(workers):
                group.create_task(self.run(handler), name=f"reconcile-{number}")

    def close(self) -> None:
        """Cancels every timer."""
        for timer in self._timers.values():
            with contextlib.suppress(RuntimeError):
                timer.cancel()
        self._timers.clear()

    def _due(self, key: Key) -> None:
        del self._timers[key]
        self.add(key)

    def _backoff(self, key: Key) -> float:
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay = min(FIRST_BACKOFF_SECONDS * 2.0 ** min(failures, 16), LONGEST_BACKOFF_SECONDS)
        return delay * random.uniform(0.9, 1.1)
