"""Runs two passes of one rank in turns: while one waits for a collective, the other computes.

DualPipe's pairs need this (DeepSeek-V3, arXiv 2412.19437, section 3.2.1): the all-to-all of one micro-batch's experts
overlaps the other micro-batch's matrix products. Each pass has a thread, but only one runs at a time: a pass yields to
the other when it waits for a collective with `wait_overlapped`. To take part, a layer starts its collective with
`async_op=True` and waits with `wait_overlapped`. The order of collectives is the same on all ranks of a group, since it
depends only on the program.
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
    """A pending collective."""

    def wait(self) -> object:
        """Wait for it; on a GPU, let the current stream wait for it."""


def wait_overlapped(work: Waitable) -> None:
    """Wait for a collective; the other pass of the pair, if there is one, computes in the meantime."""
    if _pair is not None:
        _pair.yield_turn()
    work.wait()


def run_overlapped(first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
    """Run two passes in turns, `first` first, and return their results.

    `first` runs in the calling thread, because a forward pass needs that thread's hooks on saved tensors; the other one
    runs in a helper thread.

    Raises:
        BaseException: raised by one of them, or by the first if both raised; the other pass is aborted.
    """
    global _pair
    if _pair is not None:
        raise RuntimeError("a pair of passes is already running")
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
        # Blocks of the two passes end in any order, so the state that each restored may not be the original one.
        split_backward.set_current_store(pair.store)
    for side in sorted(pair.errors):
        if not isinstance(pair.errors[side], _AbortedError):
            raise pair.errors[side]
    return result, results[0]


_pair: _Pair | None = None


class _AbortedError(BaseException):
    """The other pass failed."""


class _Pair:
    """Tracks which pass may run."""

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
        """Let the other pass run until it waits. Autograd may call this from its own thread."""
        side = self._running
        if 1 - side in self._ended:
            return
        store = split_backward.current_store()
        self._give_turn()
        self.wait_for_turn(side)
        split_backward.set_current_store(store)

    def end(self, side: int) -> None:
        """Mark this pass as finished."""
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
