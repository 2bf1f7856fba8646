"""Finds callbacks of the operator's event loop that block it: each is judged by its own CPU time, not by elapsed time.

Garbage collection is left out, because its time depends on the objects of all tests in this process.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MOST_CPU_SECONDS = 0.05
_watched = threading.local()


def watch_this_thread(active: threading.Event) -> None:
    """Judge the callbacks of this thread's event loop from when `active` is set. Before, nothing waits for the loop."""
    _watched.active = active


@contextmanager
def watching() -> Iterator[list[str]]:
    """The callbacks that took too long within the block."""
    slow: list[str] = []
    run = asyncio.Handle._run
    collecting: dict[int, float] = {}
    collected: dict[int, float] = {}

    def note_collection(phase: str, info: dict[str, Any]) -> None:
        thread = threading.get_ident()
        if phase == "start":
            collecting[thread] = time.thread_time()
        elif thread in collecting:
            collected[thread] = collected.get(thread, 0.0) + time.thread_time() - collecting.pop(thread)

    def timed(handle: asyncio.Handle) -> None:
        active = getattr(_watched, "active", None)
        if active is None or not active.is_set():
            run(handle)
            return
        thread = threading.get_ident()
        started, before = time.thread_time(), collected.get(thread, 0.0)
        run(handle)
        took = time.thread_time() - started - (collected.get(thread, 0.0) - before)
        if took > MOST_CPU_SECONDS:
            slow.append(f"{1000 * took:.0f} ms of CPU time: {_owner(handle)}")

    gc.callbacks.append(note_collection)
    asyncio.Handle._run = timed  # type: ignore[method-assign]
    try:
        yield slow
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]
        gc.callbacks.remove(note_collection)


def _owner(handle: asyncio.Handle) -> str:
    """The task that a callback lets go on, with the place where it waits now; otherwise the callback."""
    task = getattr(getattr(handle, "_callback", None), "__self__", None)
    return repr(task) if isinstance(task, asyncio.Task) else repr(handle)
