"""How many reconciles run at once: fewer while the API server is slow because of them.

A server that is saturated answers no more calls if more are sent; each only takes longer, and so does each reconcile.
The latency of writes is compared with the best of the last minute, so that a server whose writes always take long, such
as for a webhook, is not taken for a saturated one. TCP Vegas does the same with packets.
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
"""With this many times the best latency, fewer may run."""
FAST = 2.0
"""With less than this many times the best latency, more may run."""
NOT_SLOW_SECONDS = 0.02
"""A latency below this is never taken for a sign of load."""
SMOOTHING = 0.1
STEP_SECONDS = 0.2
"""Time between two steps, in which the effect of the last one shows."""
LONG_SECONDS = 1.0
"""A reconcile that takes longer, such as the start of a large gang, leaves its place to another one."""
BEST_OF_SECONDS = 60.0
"""Time over which the best latency is taken, in two halves."""


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
        self._latency: float | None = None
        self._stepped = clock()
        self._best = [float("inf"), float("inf")]
        """The best latency of this half of the period, and of the one before."""
        self._half_began = clock()

    def observe(self, seconds: float) -> None:
        """Note how long a write took."""
        now = self._clock()
        if now - self._half_began > BEST_OF_SECONDS / 2:
            self._best, self._half_began = [float("inf"), self._best[0]], now
        self._best[0] = min(self._best[0], seconds)
        self._latency = seconds if self._latency is None else self._latency + SMOOTHING * (seconds - self._latency)
        if now - self._stepped < STEP_SECONDS:
            return
        best = min(self._best)
        if self._latency > max(SLOWER * best, NOT_SLOW_SECONDS):
            self.allowed = max(min(LEAST, self._most), self.allowed - 1)
        elif self._latency < max(FAST * best, NOT_SLOW_SECONDS):
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
