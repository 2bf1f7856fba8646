"""Times the parts of a step on one rank: its passes, its update, and its waits for communication by dimension.

A wait that a pass hides behind computation is not counted: only the time in which the rank could not go on. On a CPU
that is the time for which the calling thread blocks. On a GPU it is the time for which the compute stream stands still,
between two events in this stream: the host waits for nothing, and reads the events when a later step has ended.

Phases nest, and each counts without its waits and without phases inside it. So the sum of all parts is the time of the
outermost phases, and of waits outside of phases.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

PASSES, UPDATE = "passes", "update"
"""Forward and backward passes of a step, and the update of the parameters."""

_OPEN, _CLOSE = "+", "-"
"""What a log's entry begins with if it is not a wait."""

Entry = tuple[str, Any, Any]
"""A dimension, and the moments at which a wait for its communication began and ended."""
Part = tuple[str, str]
"""A phase, and the dimension whose communication it waits for; empty for the phase without its waits."""


class Waitable(Protocol):
    """Pending communication."""

    def wait(self) -> object:
        """Wait for it; on a GPU, let the current stream wait for it."""


class StepClock(Protocol):
    """Times phases, and waits in them. One thread at a time uses it: others run in `beside_steps`."""

    @property
    def mark(self) -> Callable[[], Any]:
        """Returns this moment, for `record`."""

    @property
    def record(self) -> Callable[[Entry], None]:
        """Records a wait, with the moments at which it began and ended. Waits do not nest."""

    def open(self, phase: str) -> None:
        """Open a phase. It counts without waits, and without phases inside it."""

    def close(self) -> None:
        """Close the phase that was opened last."""

    def take(self) -> dict[Part, float]:
        """Return the seconds of all parts that have ended and were not returned yet."""


class HostClock:
    """A `StepClock` of the calling thread.

    A rank waits about a hundred times in a step, each time with cold caches. So a wait only reads the time twice and
    appends to a list. What it means is computed once for each step.
    """

    def __init__(self) -> None:
        self.mark = time.perf_counter
        self._log: list[Entry] = []
        self.record = self._log.append
        self._open: list[_OpenPhase] = []

    def open(self, phase: str) -> None:
        """See `StepClock.open`."""
        self.record((_OPEN + phase, self.mark(), 0.0))

    def close(self) -> None:
        """See `StepClock.close`."""
        self.record((_CLOSE, 0.0, self.mark()))

    def take(self) -> dict[Part, float]:
        """See `StepClock.take`."""
        seconds: dict[Part, float] = {}
        for what, began, ended in self._log:
            if what == _CLOSE:
                block = self._open.pop()
                passed = ended - block.began
                _add(seconds, (block.phase, ""), passed - block.inside)
                if self._open:
                    self._open[-1].inside += passed
            elif what[0] == _OPEN:
                self._open.append(_OpenPhase(what[1:], began))
            else:
                phase = ""
                if self._open:
                    phase = self._open[-1].phase
                    self._open[-1].inside += ended - began
                _add(seconds, (phase, what), ended - began)
        self._log.clear()
        return seconds


@dataclass(slots=True)
class _OpenPhase:
    phase: str
    began: float
    inside: float = 0.0
    """Seconds of its waits and of phases inside it."""


def _add(seconds: dict[Part, float], part: Part, more: float) -> None:
    seconds[part] = seconds.get(part, 0.0) + more


@dataclass(slots=True)
class _StreamBlock:
    part: Part
    began: torch.cuda.Event
    outer: _StreamBlock | None
    ended: torch.cuda.Event | None = None
    inside: float = 0.0


@dataclass
class StreamClock:
    """A `StepClock` of the current stream of a GPU, when it is created. Waits in other streams do not count."""

    stream: torch.cuda.Stream = field(default_factory=torch.cuda.current_stream)
    _open: list[_StreamBlock] = field(default_factory=list)
    _closed: list[_StreamBlock] = field(default_factory=list)
    """In the order in which they ended: inner blocks first."""

    def mark(self) -> torch.cuda.Event | None:
        """See `StepClock.mark`. None in another stream, which runs beside the computation."""
        return self._event() if torch.cuda.current_stream() == self.stream else None

    def record(self, entry: Entry) -> None:
        """See `StepClock.record`."""
        dimension, began, ended = entry
        if began is not None and ended is not None:
            outer = self._open[-1] if self._open else None
            part = (outer.part[0] if outer is not None else "", dimension)
            self._closed.append(_StreamBlock(part, began, outer, ended))

    def open(self, phase: str) -> None:
        """See `StepClock.open`."""
        self._open.append(_StreamBlock((phase, ""), self._event(), self._open[-1] if self._open else None))

    def close(self) -> None:
        """See `StepClock.close`."""
        block = self._open.pop()
        block.ended = self._event()
        self._closed.append(block)

    def take(self) -> dict[Part, float]:
        """See `StepClock.take`. Blocks that the stream has not completed yet are left for the next time."""
        seconds: dict[Part, float] = {}
        done = 0
        for block in self._closed:
            if block.ended is None or not block.ended.query():  # type: ignore[no-untyped-call]
                break
            passed = block.began.elapsed_time(block.ended) / 1000
            seconds[block.part] = seconds.get(block.part, 0.0) + passed - block.inside
            if block.outer is not None:
                block.outer.inside += passed
            done += 1
        del self._closed[:done]
        return seconds

    def _event(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event


def seconds_between(began: Any, ended: Any) -> float | None:
    """Return the time between two marks of a clock. None if the stream has not passed them, or they are of another."""
    if began is None or ended is None:
        return None
    if isinstance(began, float):
        return float(ended - began)
    return began.elapsed_time(ended) / 1000 if ended.query() and began.query() else None


DimensionOf = Callable[[dist.ProcessGroup | None], str | None]
"""Returns the dimension of a group; None for a group whose communication is not a step's."""

_current: StepClock | None = None
"""The clock of this process; None while nothing is timed."""
_dimension_of: DimensionOf = lambda group: None  # noqa: E731 - a variable


def current_clock() -> StepClock | None:
    """Return the clock of the step that this process runs."""
    return _current


@contextmanager
def running_clock(device: torch.device, dimension_of: DimensionOf) -> Iterator[StepClock]:
    """Time what this process does within the block, on a new clock. One at a time."""
    global _current, _dimension_of
    clock: StepClock = StreamClock() if device.type == "cuda" else HostClock()
    before = _current, _dimension_of
    _current, _dimension_of = clock, dimension_of
    try:
        yield clock
    finally:
        if _current is clock:
            _current, _dimension_of = before


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Count the block as a phase of the step."""
    clock = _current
    if clock is None:
        yield
        return
    clock.open(name)
    try:
        yield
    finally:
        clock.close()


class _Thread(threading.local):
    """What is known of the calling thread."""

    beside_steps = False


_thread = _Thread()


@contextmanager
def beside_steps() -> Iterator[None]:
    """Count nothing that this thread waits for in the block: steps go on meanwhile."""
    before, _thread.beside_steps = _thread.beside_steps, True
    try:
        yield
    finally:
        _thread.beside_steps = before


def is_beside_steps() -> bool:
    """Whether the calling thread is in `beside_steps`."""
    return _thread.beside_steps


def wait_for(work: Waitable, group: dist.ProcessGroup) -> None:
    """Wait for communication of a group, and count the time."""
    clock = None if _thread.beside_steps else _current
    dimension = _dimension_of(group) if clock is not None else None
    if clock is None or dimension is None:
        work.wait()
        return
    began = clock.mark()
    work.wait()
    clock.record((dimension, began, clock.mark()))
