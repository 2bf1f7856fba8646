"""Reports to the agent that a rank works, while it completes no step, so that the rank does not count as hanging."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from meshwright_worker.rank.task import AT_WORK_SECONDS, RankEvents


@contextmanager
def reporting_work(events: RankEvents, seconds: float = AT_WORK_SECONDS) -> Iterator[None]:
    """Report in a thread, every `seconds`, that the rank works.

    The block must have a time limit, because a rank that hangs in it is not detected, and must report no events.
    """
    over = threading.Event()

    def report() -> None:
        while not over.wait(seconds):
            events.at_work()

    thread = threading.Thread(target=report, name="at work", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def reporting_compilation(events: RankEvents, *, compiles: bool) -> Iterator[None]:
    """If the block compiles, report whenever torch.compile begins or ends a graph: the first step has several."""
    if not compiles:
        yield
        return
    # Imported here, because the import takes longer than that of torch.
    from torch._dynamo.callback import callback_handler

    def report(_: object) -> None:
        events.at_work()

    callback_handler.register_start_callback(report)
    callback_handler.register_end_callback(report)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(report)
        callback_handler.remove_end_callback(report)
