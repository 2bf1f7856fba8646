"""Writes to the checkpoint volume in threads: it may not answer, and nobody waits for that."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

FLUSH_SECONDS = 3.0
"""How long the agent waits for the volume before it exits."""


class VolumeWrites:
    """Threads that write."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, name: str, write: Callable[[], None]) -> None:
        """Call `write` in a thread."""
        # A daemon: a volume that does not answer must not keep the agent from exiting.
        thread = threading.Thread(target=write, name=name, daemon=True)
        self._threads = [*(other for other in self._threads if other.is_alive()), thread]
        thread.start()

    async def flush(self, seconds: float = FLUSH_SECONDS) -> None:
        """Wait until everything is written, for at most `seconds`."""
        await asyncio.to_thread(self._join, seconds)

    def _join(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
