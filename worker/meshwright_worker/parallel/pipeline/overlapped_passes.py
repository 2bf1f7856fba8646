"""Two passes of one rank that take turns: while one waits for a collective, the other computes.

This is what DualPipe's pairs are for (DeepSeek-V3, arXiv 2412.19437, section 3.2.1): the all-to-all of one
micro-batch's experts runs during the other micro-batch's matrix products. Each pass has a thread, but only one runs at
a time; they change places where a pass calls `wait_overlapped` with a collective that it has started. So what a
layer does to
take part is to start its collective with `async_op=True` and to call `wait_overlapped` where it would have waited.
The order of
collectives stays the same on all ranks of a group, since it depends on the program alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from meshwright_worker.models import split_backward

First = TypeVar("First")
Second = TypeVar("Second")


class Waitable(Protocol):
    """A collective that has been started."""

    def wait(self) -> object:
        """Wait for it; on a GPU, let the current stream wait for it."""


def wait_overlapped(work: Waitable) -> None:
    """Wait for a collective; let the other pass of the pair compute in the meantime, if there is one."""
    if _pair is not None:
        _pair.yield_turn()
    work.wait()


def run_overlapped(first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
    """The results of two passes that take turns, `first` first.

    It runs in the calling thread, whose hooks on saved tensors a forward pass needs; the other one in a helper.

    Raises:
        BaseException: what one of them raised, the first one's if both did; the other is given up.
    """
    global _pair
    if _pair is not None:
        raise RuntimeError("a pair of passes runs already")
    _pair = pair = _Pair()
    results: list[Second] = []
    helper = threading.Thread(target=_run_second, args=(pair, second, results), name="overlapped pass", daemon=True)
    try:
        helper.start()
        result = first()
    except BaseException as error:
        pair.errors[0] = error
    finally:
        pair.end(0)
        helper.join()
        _pair = None
        # Blocks of the two passes end in any order, so what each put back need not be what was there before both.
        split_backward.set_current_store(pair.store)
    for side in sorted(pair.errors):
        if not isinstance(pair.errors[side], _AbortedError):
            raise pair.errors[side]
    return result, results[0]


_pair: _Pair | None = None


class _AbortedError(BaseException):
    """The other pass failed."""


class _Pair:
    """Whose turn it is."""

    def __init__(self) -> None:
        self.errors: dict[int, BaseException] = {}
        self.store = split_backward.current_store()
        self.device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self.stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self._running = 0
        self._ended: set[int] = set()
        self._turn = threading.Condition()

    def wait_for_turn(self, side: int) -> None:
        """Wait until the other pass calls `wait_overlapped`, or ends."""
        with self._turn:
            self._turn.wait_for(lambda: self._running == side)
        if 1 - side in self.errors:
            raise _AbortedError

    def yield_turn(self) -> None:
        """Let the other pass go on until it waits itself. Autograd may call it from a thread of its own."""
        side = self._running
        if 1 - side in self._ended:
            return
        store = split_backward.current_store()
        self._give_turn()
        self.wait_for_turn(side)
        split_backward.set_current_store(store)

    def end(self, side: int) -> None:
        """This pass is over."""
        with self._turn:
            self._ended.add(side)
        if 1 - side not in self._ended:
            self._give_turn()

    def _give_turn(self) -> None:
        with self._turn:
            self._running = 1 - self._running
            self._turn.notify_all()


def _run_second(pair: _Pair, run: Callable[[], Second], results: list[Second]) -> None:
    try:
        pair.wait_for_turn(1)
        split_backward.set_current_store(pair.store)
        if pair.stream is not None:
            torch.cuda.set_device(pair.device)
            torch.cuda.set_stream(pair.stream)
        results.append(run())
    except BaseException as error:
        pair.errors[1] = error
    finally:
        pair.end(1)
