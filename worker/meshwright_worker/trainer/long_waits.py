"""Tells the agent that a rank does not hang while it reports no step."""

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


@contextmanager
def telling_of_compilation(events: RankEvents, *, compiles: bool) -> Iterator[None]:
    """If the block compiles, tell whenever torch.compile begins or ends a graph: the first step has several."""
    if not compiles:
        yield
        return
    # Imported here, because the import takes longer than that of torch.
    from torch._dynamo.callback import callback_handler

    def tell(_: object) -> None:
        events.at_work()

    callback_handler.register_start_callback(tell)
    callback_handler.register_end_callback(tell)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(tell)
        callback_handler.remove_end_callback(tell)
