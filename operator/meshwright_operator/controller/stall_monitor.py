"""Measures for how long the event loop does not run, because a callback takes long or the machine is overloaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from meshwright_operator.operator_metrics import OperatorMetrics

PERIOD_SECONDS = 0.25
STALL_SECONDS = 0.05
"""Delays up to this long are not counted."""


class StallMonitor:
    """A timer of the event loop that observes how late it is."""

    def __init__(self, metrics: OperatorMetrics) -> None:
        self._metrics = metrics
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Measure within the block."""
        self._schedule(asyncio.get_running_loop())
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(PERIOD_SECONDS, self._tick, loop, loop.time() + PERIOD_SECONDS)

    def _tick(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        late = loop.time() - due
        if late > STALL_SECONDS:
            self._metrics.event_loop_stalls.observe(late)
        self._schedule(loop)
