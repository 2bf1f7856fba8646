"""Tells the agent that a rank does not hang while it cannot do so itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from meshwright_worker.rank.task import AT_WORK_SECONDS, RankEvents


@contextmanager
def telling_at_work(events: RankEvents, seconds: float = AT_WORK_SECONDS) -> Iterator[None]:
    """Tell from time to time that the rank is at work, in a thread. The block has a time limit of its own, and reports
    no events itself.
    """
    over = threading.Event()

    def tell() -> None:
        while not over.wait(seconds):
            events.at_work()

    thread = threading.Thread(target=tell, name="at work", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
