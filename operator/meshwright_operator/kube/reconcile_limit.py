"""How many reconciles run at once: fewer while the API server is slow because of them.

A server that is saturated answers no more calls if more are sent; each only takes longer, and so does each reconcile.
The time in which objects are created is compared with the best of the last minute for the same resource, so that a
server that always takes long, such as for a webhook of pods, is not taken for a saturated one. TCP Vegas does the same
with packets. Other writes do not count: the time of a patch depends on the size of the object.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

LEAST = 2
"""Reconciles that always may run at once."""
SLOWER = 3.0
"""With this many times the best time, fewer may run."""
FAST = 2.0
"""With less than this many times the best time, more may run."""
NOT_SLOW_SECONDS = 0.02
"""A shorter time is never taken for a sign of load."""
SMOOTHING = 0.1
STEP_SECONDS = 0.2
"""Time between two steps, in which the effect of the last one shows."""
LONG_SECONDS = 1.0
"""A reconcile that takes longer, such as the start of a large gang, leaves its place to another one."""
BEST_OF_SECONDS = 60.0
"""Time over which the best time is taken, in two halves."""


class ReconcileLimit:
    """The places of reconciles. Used from one event loop only.

    Args:
        most: Reconciles that run at once as long as the API server is fast.
        clock: Seconds on a monotonic clock.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self.allowed = most
        """Reconciles that may run at once now, besides long ones."""
        self._running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._seconds = 0.0
        """The time of a creation, smoothed."""
        self._ratio = 1.0
        """How many times the best time that is, smoothed."""
        self._stepped = clock()
        self._best: list[dict[str, float]] = [{}, {}]
        """Resource -> the best time, in this half of the period and in the one before."""
        self._half_began = clock()

    def observe(self, resource: str, seconds: float) -> None:
        """Note how long it took to create an object."""
        now = self._clock()
        if now - self._half_began > BEST_OF_SECONDS / 2:
            self._best, self._half_began = [{}, self._best[0]], now
        self._best[0][resource] = min(self._best[0].get(resource, seconds), seconds)
        best = min(half[resource] for half in self._best if resource in half)
        self._seconds += SMOOTHING * (seconds - self._seconds)
        self._ratio += SMOOTHING * (seconds / max(best, 1e-6) - self._ratio)
        if now - self._stepped < STEP_SECONDS:
            return
        if self._seconds > NOT_SLOW_SECONDS and self._ratio > SLOWER:
            self.allowed = max(min(LEAST, self._most), self.allowed - 1)
        elif self._seconds < NOT_SLOW_SECONDS or self._ratio < FAST:
            self.allowed = min(self._most, self.allowed + 1)
        self._stepped = now
        self._wake()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place, and keep it during the block, but for at most `LONG_SECONDS`."""
        while self._running >= self.allowed:
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            try:
                await waiting
            except asyncio.CancelledError:
                if waiting.done() and not waiting.cancelled():
                    self._wake()  # it was another one's turn
                raise
            finally:
                if waiting in self._waiting:
                    self._waiting.remove(waiting)
        self._running += 1
        left = False

        def leave() -> None:
            nonlocal left
            if not left:
                left = True
                self._running -= 1
                self._wake()

        timer = asyncio.get_running_loop().call_later(LONG_SECONDS, leave)
        try:
            yield
        finally:
            timer.cancel()
            leave()

    def _wake(self) -> None:
        free = self.allowed - self._running
        while free > 0 and self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(None)
                free -= 1
