"""A queue of keys: each key at most once in it, one run per key at a time, back-off per key.

A key that is added while it runs is run once more afterwards: no change is lost and none is processed twice at once.
Delayed adds are kept earliest-first per key. Used from one event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, Protocol, TypeVar

Key = TypeVar("Key", bound=Hashable)

FIRST_BACKOFF_SECONDS = 0.1
LONGEST_BACKOFF_SECONDS = 60.0

log = logging.getLogger(__name__)


class QueueMetrics(Protocol):
    """Is told how long keys waited and how often they failed."""

    def waited(self, seconds: float) -> None:
        """A key begins to run after this long in the queue."""

    def retried(self) -> None:
        """A key failed and will run again."""


class WorkQueue(Generic[Key]):
    """Keys that want to be reconciled."""

    def __init__(self, metrics: QueueMetrics | None = None, expected_errors: tuple[type[Exception], ...] = ()) -> None:
        """`expected_errors` are errors whose message says it all: they are logged without a traceback."""
        self._metrics = metrics
        self._expected_errors = expected_errors
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._queued: dict[Key, float] = {}
        """Keys in `_ready`, and since when."""
        self._processing: set[Key] = set()
        self._dirty: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    def __len__(self) -> int:
        """Keys that wait to run now; delayed ones not counted."""
        return len(self._queued) + len(self._dirty)

    def add(self, key: Key) -> None:
        """Runs the key soon: at once, or again after its current run. Does nothing once draining has begun."""
        if self._draining:
            return
        if key in self._processing:
            self._dirty.add(key)
        elif key not in self._queued:
            self._queued[key] = time.monotonic()
            self._idle.clear()
            self._ready.put_nowait(key)

    def add_unless_backing_off(self, key: Key) -> None:
        """Runs the key soon, unless it failed and its next try is due later: nothing new is known of it."""
        if key not in self._failures or key not in self._timers:
            self.add(key)

    def add_after(self, key: Key, seconds: float) -> None:
        """Runs the key after `seconds`, or earlier if an earlier time was asked for already."""
        if seconds <= 0:
            self.add(key)
            return
        if self._draining:
            return
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= loop.time() + seconds:
                return
            timer.cancel()
        self._timers[key] = loop.call_later(seconds, self._timer_fired, key)

    def forget(self, key: Key) -> None:
        """Drops the key's timer and failures: what it named is gone."""
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
        self._failures.pop(key, None)

    async def run(self, handler: Callable[[Key], Awaitable[None]]) -> None:
        """Takes keys for ever and runs `handler` on them; a handler that raises only delays its own key."""
        while True:
            key = await self._ready.get()
            since = self._queued.pop(key)
            self._processing.add(key)
            if self._metrics is not None:
                self._metrics.waited(time.monotonic() - since)
            try:
                await handler(key)
            except Exception as error:
                delay = self._backoff(key)
                if self._metrics is not None:
                    self._metrics.retried()
                about = {"job": str(key), "error": str(error), "retry_seconds": round(delay, 1)}
                log.error("reconcile failed", extra=about, exc_info=not isinstance(error, self._expected_errors))
                self.add_after(key, delay)
            else:
                self._failures.pop(key, None)
            finally:
                self._processing.discard(key)
                if key in self._dirty:
                    self._dirty.discard(key)
                    self.add(key)
                if not self._queued and not self._processing:
                    self._idle.set()

    async def run_many(self, workers: int, handler: Callable[[Key], Awaitable[None]]) -> None:
        """`workers` runs of `run` at the same time."""
        async with asyncio.TaskGroup() as group:
            for number in range(workers):
                group.create_task(self.run(handler), name=f"reconcile-{number}")

    async def drain(self, seconds: float) -> bool:
        """Takes no more keys and lets those that are in run to their end; whether they did, within `seconds`."""
        self._draining = True
        self._dirty.clear()
        self.close()
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Cancels every timer."""
        for timer in self._timers.values():
            with contextlib.suppress(RuntimeError):
                timer.cancel()
        self._timers.clear()

    def _timer_fired(self, key: Key) -> None:
        del self._timers[key]
        self.add(key)

    def _backoff(self, key: Key) -> float:
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay = min(FIRST_BACKOFF_SECONDS * 2.0 ** min(failures, 16), LONGEST_BACKOFF_SECONDS)
        return delay * random.uniform(0.9, 1.1)
