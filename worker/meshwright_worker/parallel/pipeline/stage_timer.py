"""Times a stage's passes, on the clock of the device that runs them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Protocol

import torch

from meshwright.schedules.actions import ActionKind
from meshwright_worker.data.batch import Batch
from meshwright_worker.parallel.parallelize import LocalStage
from meshwright_worker.parallel.pipeline.stage import PipelineStage


class Span(Protocol):
    """A time span that starts when it is created."""

    def end(self) -> None:
        """End the span."""

    def seconds(self) -> float:
        """Its duration in seconds."""


class _HostSpan:
    def __init__(self) -> None:
        self._began = self._ended = time.perf_counter()

    def end(self) -> None:
        self._ended = time.perf_counter()

    def seconds(self) -> float:
        return self._ended - self._began


class _StreamSpan:
    """Timed by events in the compute stream: the host does not wait, and the wait before a pass is not included."""

    def __init__(self) -> None:
        self._began, self._ended = _event(), _event()
        self._began.record()

    def end(self) -> None:
        self._ended.record()

    def seconds(self) -> float:
        self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended)) / 1000


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


class Stopwatch:
    """Times the blocks under `of` while it is `running`."""

    def __init__(self, device: torch.device) -> None:
        self.running = False
        self._span: type[_HostSpan | _StreamSpan] = _StreamSpan if device.type == "cuda" else _HostSpan
        self._spans: dict[str, list[Span]] = {}

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Time the block and record it as `what`."""
        if not self.running:
            yield
            return
        span = self._span()
        yield
        span.end()
        self._spans.setdefault(what, []).append(span)

    def seconds(self, what: str) -> float:
        """Return the median of all times recorded as `what`; 0 if there are none."""
        spans = self._spans.get(what)
        return median(span.seconds() for span in spans) if spans else 0.0


class TimedStage(PipelineStage):
    """A `PipelineStage` whose passes are timed, by `ActionKind`; waiting for other stages is not included."""

    def __init__(self, stage: LocalStage, tokens: int, *, rematerialize: bool, watch: Stopwatch) -> None:
        super().__init__(stage, tokens, rematerialize=rematerialize)
        self._watch = watch

    def forward(self, micro_batch: int, batch: Batch, received: torch.Tensor | None, *, split: bool) -> torch.Tensor:
        """See `PipelineStage.forward`."""
        with self._watch.of(ActionKind.FORWARD):
            return super().forward(micro_batch, batch, received, split=split)

    def backward(self, micro_batch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """See `PipelineStage.backward`. In searched schedules this is the first half."""
        with self._watch.of(ActionKind.INPUT):
            return super().backward(micro_batch, gradient)

    def weight(self, micro_batch: int) -> None:
        """See `PipelineStage.weight`."""
        with self._watch.of(ActionKind.WEIGHT):
            super().weight(micro_batch)
