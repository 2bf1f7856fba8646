"""A work queue of keys. A key is queued at most once and runs at most once at a time; failures back off per key.

A key that is added while it runs, runs once more afterwards, so that no change is lost. Of several delayed adds of a
key, the earliest counts. The queue must be used from one event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, Protocol, TypeVar

from meshwright_operator.kube.reconcile_limit import ReconcileLimit

Key = TypeVar("Key", bound=Hashable)

FIRST_BACKOFF_SECONDS = 0.1
LONGEST_BACKOFF_SECONDS = 60.0

log = logging.getLogger(__name__)


class QueueMetrics(Protocol):
    """Records how long keys wait and how often they fail."""

    def waited(self, seconds: float) -> None:
        """Record how long a key waited in the queue."""

    def retried(self) -> None:
        """Record that a key failed and will be retried."""


class WorkQueue(Generic[Key]):
    """Keys to reconcile."""

    def __init__(
        self,
        metrics: QueueMetrics | None = None,
        expected_errors: tuple[type[Exception], ...] = (),
        limit: ReconcileLimit | None = None,
    ) -> None:
        """`expected_errors` are logged without a traceback. `limit` bounds how many keys run at once."""
        self._metrics = metrics
        self._limit = limit
        self._expected_errors = expected_errors
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._queued: dict[Key, float] = {}
        """Key in `_ready` -> since when."""
        self._processing: set[Key] = set()
        self._dirty: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._runners = 0

    def __len__(self) -> int:
        """The number of keys that wait to run now, without delayed ones."""
        return len(self._queued) + len(self._dirty)

    def pause(self) -> None:
        """Ignore all keys until `resume`."""
        self._draining = True

    def resume(self) -> None:
        """Accept keys again."""
        self._draining = False

    def add(self, key: Key) -> None:
        """Queue the key. If it is running, run it again afterwards. Does nothing while paused or draining."""
        if self._draining:
            return
        if key in self._processing:
            self._dirty.add(key)
        elif key not in self._queued:
            self._queued[key] = time.monotonic()
            self._idle.clear()
            self._ready.put_nowait(key)

    def add_unless_backing_off(self, key: Key) -> None:
        """Queue the key, unless it failed and waits for its retry."""
        if key not in self._failures or key not in self._timers:
            self.add(key)

    def add_after(self, key: Key, seconds: float) -> None:
        """Queue the key after `seconds`, or earlier if an earlier time is already set."""
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
        """Drop the key's timer and failures, because its object was deleted."""
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
        self._failures.pop(key, None)

    async def run(self, handler: Callable[[Key], Awaitable[None]]) -> None:
        """Run `handler` on queued keys until cancelled. A handler that raises delays only its own key."""
        self._runners += 1
        try:
            await self._run(handler)
        finally:
            self._runners -= 1

    async def _run(self, handler: Callable[[Key], Awaitable[None]]) -> None:
        while True:
            key = await self._ready.get()
            # A key that waits for a place stays queued, so that it is neither queued nor run twice.
            async with self._limit.place() if self._limit is not None else contextlib.nullcontext():
                await self._handle(key, handler)
            # A handler that had to wait for nothing has let nothing else run: heartbeats, the lease, other workers.
            await asyncio.sleep(0)

    async def _handle(self, key: Key, handler: Callable[[Key], Awaitable[None]]) -> None:
        since = self._queued.pop(key)
        self._processing.add(key)
        if self._metrics is not None:
            self._metrics.waited(time.monotonic() - since)
        try:
            await handler(key)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
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
        """Process keys with this many workers concurrently."""
        async with asyncio.TaskGroup() as group:
            for number in range(workers):
                group.create_task(self.run(handler), name=f"reconcile-{number}")

    async def drain(self, seconds: float) -> bool:
        """Accept no more keys, and wait for queued and running ones. Return whether they finished within `seconds`.

        Queued keys that nothing runs are dropped: this process does not reconcile yet.
        """
        self._draining = True
        self._dirty.clear()
        self.close()
        if not self._runners:
            return True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Cancel all timers."""
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


def _is_cancelled() -> bool:
    """Whether this task must end. A handler can also raise CancelledError because what it awaited was cancelled."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
