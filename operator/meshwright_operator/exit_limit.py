"""Ends a process that has begun to stop but does not. It has released its lease: only a restart makes it work again.

A task can survive its cancellation, a thread can wait for a server that never answers, and a callback can block the
event loop. `asyncio.run` and the interpreter wait for all of them without a limit. So a thread of its own watches.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

STOP_SECONDS = 15.0
"""Time for a stop, without the drain. An orderly one takes less than three seconds."""
LOG_SECONDS = 1.0
"""Time for the last log line: what reads the log may be what hangs."""
EXIT_CODE = 1
MOST_NAMED = 20
"""Tasks and threads that the log line names."""

log = logging.getLogger(__name__)


class ExitLimit:
    """Exits with `EXIT_CODE` a limited time after `start`, and logs what the process waited for."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        """`loop` is the event loop whose tasks are named."""
        self._loop = loop
        self._seconds = seconds
        self._timer: threading.Timer | None = None

    def start(self) -> None:
        """Begin to count, unless `start` was called before."""
        if self._timer is None:
            self._timer = threading.Timer(self._seconds, self._expired)
            self._timer.name = "exit limit"
            self._timer.daemon = True
            self._timer.start()

    def _expired(self) -> None:
        logging_thread = threading.Thread(target=self._log, name="exit limit", daemon=True)
        logging_thread.start()
        logging_thread.join(LOG_SECONDS)
        os._exit(EXIT_CODE)

    def _log(self) -> None:
        waits_for = [*_tasks(self._loop), *_threads()]
        named = "; ".join(waits_for[:MOST_NAMED]) + ("; ..." if len(waits_for) > MOST_NAMED else "")
        log.error("did not stop in time; exiting", extra={"seconds": self._seconds, "waits_for": named})


def _tasks(loop: asyncio.AbstractEventLoop) -> Iterator[str]:
    """The tasks of the loop that are not done, with the line at which each waits."""
    for task in sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name()):
        yield f"task {task.get_name()} at {_awaited_at(task.get_coro())}"


def _awaited_at(awaited: Any) -> str:
    """The innermost line at which a coroutine waits."""
    line = "?"
    while awaited is not None:
        # Of a coroutine, an asynchronous generator, or a generator.
        frame = _first(awaited, "cr_frame", "ag_frame", "gi_frame")
        line = _line(frame) if frame is not None else line
        awaited = _first(awaited, "cr_await", "ag_await", "gi_yieldfrom")
    return line


def _first(holder: object, *names: str) -> Any:
    return next((found for name in names if (found := getattr(holder, name, None)) is not None), None)


def _threads() -> Iterator[str]:
    """The other threads, with the line that each executes."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if thread.name != "exit limit" and thread.ident in frames:
            yield f"thread {thread.name} at {_line(frames[thread.ident])}"


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
