"""Times the parts of a step on one rank: its passes, its update, and its waits for communication by dimension.

A wait that a pass hides behind computation is not counted: only the time in which the rank could not go on. On a CPU
that is the time for which the calling thread blocks. On a GPU it is the time for which the compute stream stands still,
between two events in this stream: the host waits for nothing, and reads the events when a later step has ended.

Blocks nest, and each counts without those inside it. So the sum of all parts is the time of the outermost blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

PASSES, UPDATE = "passes", "update"
"""Forward and backward passes of a step, and the update of the parameters."""

Part = tuple[str, str]
"""A phase, and the dimension whose communication it waits for; empty for the phase without its waits."""


class StepClock(Protocol):
    """Times blocks. A block is opened and closed by one thread at a time."""

    @property
    def counts_here(self) -> bool:
        """Whether what the caller does now belongs to the computation, and not to a stream beside it."""

    def open(self, phase: str | None, dimension: str = "") -> None:
        """Open a block: a phase, or within the current phase (None) a wait."""

    def close(self) -> None:
        """Close the block that was opened last."""

    def take(self) -> dict[Part, float]:
        """Return the seconds of all parts that have ended and were not returned yet."""


class HostClock:
    """A `StepClock` of the calling thread."""

    counts_here = True

    def __init__(self) -> None:
        self._seconds: dict[Part, float] = {}
        self._open: list[tuple[Part, float]] = []
        self._inside: list[float] = [0.0]
        """For each open block, and for what is outside all of them, the seconds of the blocks in it."""

    def open(self, phase: str | None, dimension: str = "") -> None:
        """See `StepClock.open`."""
        name = phase if phase is not None else self._open[-1][0][0] if self._open else ""
        self._inside.append(0.0)
        self._open.append(((name, dimension), time.perf_counter()))

    def close(self) -> None:
        """See `StepClock.close`."""
        ended = time.perf_counter()
        part, began = self._open.pop()
        passed = ended - began
        seconds = self._seconds
        seconds[part] = seconds.get(part, 0.0) + passed - self._inside.pop()
        self._inside[-1] += passed

    def take(self) -> dict[Part, float]:
        """See `StepClock.take`."""
        taken, self._seconds = self._seconds, {}
        return taken


@dataclass(slots=True)
class _StreamBlock:
    part: Part
    began: torch.cuda.Event
    outer: _StreamBlock | None
    ended: torch.cuda.Event | None = None
    inside: float = 0.0


@dataclass
class StreamClock:
    """A `StepClock` of the current stream of a GPU, when it is created."""

    stream: torch.cuda.Stream = field(default_factory=torch.cuda.current_stream)
    _open: list[_StreamBlock] = field(default_factory=list)
    _closed: list[_StreamBlock] = field(default_factory=list)
    """In the order in which they ended: inner blocks first."""

    @property
    def counts_here(self) -> bool:
        """See `StepClock.counts_here`."""
        return bool(torch.cuda.current_stream() == self.stream)

    def open(self, phase: str | None, dimension: str = "") -> None:
        """See `StepClock.open`."""
        outer = self._open[-1] if self._open else None
        name = phase if phase is not None else outer.part[0] if outer else ""
        self._open.append(_StreamBlock((name, dimension), self._event(), outer))

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


@contextmanager
def waiting_in(group: dist.ProcessGroup) -> Iterator[None]:
    """Count the block as a wait for communication in the dimension of a group."""
    clock = _current
    dimension = _dimension_of(group) if clock is not None else None
    if clock is None or dimension is None or not clock.counts_here:
        yield
        return
    clock.open(None, dimension)
    try:
        yield
    finally:
        clock.close()
