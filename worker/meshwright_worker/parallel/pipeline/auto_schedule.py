"""Schedules that measure their costs: time the passes in the first steps, then run an order for these times.

The measured times differ from run to run, and so may the order; the results do not: in every order, a stage sums its
gradients micro-batch by micro-batch (`meshwright.schedules.automatic`). A repeated or resumed run therefore trains the
same bits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Protocol

import torch
import torch.distributed as dist

from meshwright.figures import format_number
from meshwright.schedules.actions import ActionKind, Schedule
from meshwright.schedules.measured_costs import PipelineTimes, TimingReport, faster_schedule, median_times, round_times
from meshwright.schedules.schedule import PipelineScheduleKind
from meshwright.schedules.simulator import ActionCosts, simulate
from meshwright_worker.data.batch import Batch
from meshwright_worker.distributed.collectives import all_gather_into
from meshwright_worker.distributed.mesh import Mesh
from meshwright_worker.parallel.parallelize import LocalStage
from meshwright_worker.parallel.pipeline.p2p import P2PChannels
from meshwright_worker.parallel.pipeline.schedule_executor import ScheduleExecutor
from meshwright_worker.parallel.pipeline.slot_times import SlotRecorder
from meshwright_worker.parallel.pipeline.stage import PipelineStage

log = logging.getLogger(__name__)

WARM_UP_STEPS, MEASURED_STEPS = 1, 2
"""Steps before passes are timed, in which the process compiles, connects and allocates; then the number of
timed steps.
"""
_SENDS = 5
"""Number of timed sends, after one that connects both ends."""
_HOP = "hop"


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

    def weight(self, micro_batch: int, *, reduce: bool = False, last: bool = False) -> None:
        """See `PipelineStage.weight`."""
        with self._watch.of(ActionKind.WEIGHT):
            super().weight(micro_batch, reduce=reduce, last=last)


class AutoScheduleExecutor(ScheduleExecutor):
    """The executor of a rank whose schedule measures its costs, with one stage per rank.

    Args:
        kind: the schedule's class.
        pipeline_stage: this rank's stage.
        schedule: of the first steps, within `limit`.
        channels: to the other ranks of the pipeline.
        mesh: its ranks that take every step together agree on the times.
        watch: the stopwatch that times the stage's passes.
        limit: maximum number of micro-batches whose activations a rank may store.
        width: of the hidden states.
        slices: number of parts that the positions of hidden states are split into over a tensor group.
        reduces_each: whether FSDP reduces gradients in each micro-batch.
        recorder: times the slots of some steps.
    """

    def __init__(
        self,
        kind: PipelineScheduleKind,
        pipeline_stage: TimedStage,
        schedule: Schedule,
        channels: P2PChannels,
        mesh: Mesh,
        watch: Stopwatch,
        *,
        limit: int,
        width: int,
        slices: int,
        reduces_each: bool = False,
        recorder: SlotRecorder | None = None,
    ) -> None:
        super().__init__(
            [pipeline_stage], schedule, mesh.coordinates.pipeline, channels, width=width, slices=slices,
            reduces_each=reduces_each, recorder=recorder,
        )  # fmt: skip
        self._kind, self._stage = kind, pipeline_stage.stage
        self._mesh, self._watch, self._limit = mesh, watch, limit
        self._steps = 0
        self.times: PipelineTimes | None = None
        """The measured times that all ranks agreed on, in seconds."""

    def run(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """See `Executor.run`. Collective over the ranks that take every step together."""
        self._steps += 1
        self._watch.running = WARM_UP_STEPS < self._steps <= WARM_UP_STEPS + MEASURED_STEPS
        total = super().run(micro_batches)
        if self._steps == WARM_UP_STEPS + MEASURED_STEPS:
            self._time_sends(micro_batches[0])
            self._watch.running = False
            self._search()
        return total

    def _time_sends(self, part: Batch) -> None:
        """Exchange hidden states with both neighbors, in pairs: first even ranks with the next ones, then odd ranks."""
        rows, length = part.tokens.shape
        x = torch.zeros(
            rows,
            length // self._slices,
            self._width,
            dtype=self._stage.module.compute,
            device=self._mesh.device,
        )
        for parity in (0, 1):
            partner = self._rank + (1 if self._rank % 2 == parity else -1)
            if not 0 <= partner < len(self.schedule.ranks):
                continue
            self._channels.exchange(x, partner)
            for _ in range(_SENDS):
                with self._watch.of(_HOP):
                    self._channels.exchange(x, partner)

    def _search(self) -> None:
        self.times = times = self._gather_times()
        before = self.schedule
        self.set_schedule(faster_schedule(self._kind, before, self._limit, round_times(times)))
        first, now = (simulate(order, times.costs, times.hop) for order in (before, self.schedule))
        self.bubble = now.bubble
        log.info(
            "pipeline order searched with measured times: a step's passes take %.4g s with a bubble of %.1f %%, "
            "%.4g s and %.1f %% in the order for counted operations; forward/input/weight of each stage in "
            "milliseconds %s, a send %.3g",
            now.makespan,
            100 * now.bubble,
            first.makespan,
            100 * first.bubble,
            " ".join(_milliseconds(costs) for costs in times.costs),
            1000 * times.hop,
        )

    def _gather_times(self) -> PipelineTimes:
        """Return times that are the same on every rank, to the last bit."""
        group, device = self._mesh.island_group, self._mesh.device
        seconds = [
            self._watch.seconds(what) for what in (ActionKind.FORWARD, ActionKind.INPUT, ActionKind.WEIGHT, _HOP)
        ]
        own = torch.tensor(seconds, dtype=torch.float64, device=device)
        gathered = own.new_empty(dist.get_world_size(group), len(seconds))
        all_gather_into(gathered, own, group)
        reports = []
        for rank, row in zip(dist.get_process_group_ranks(group), gathered.tolist(), strict=True):
            *costs, hop = row
            reports.append(TimingReport(self._mesh.layout.coordinates(rank).pipeline, ActionCosts(*costs), hop))
        return median_times(reports, self.schedule.stages)


def _milliseconds(costs: ActionCosts) -> str:
    each = (costs.forward, costs.backward_input, costs.backward_weight)
    return "/".join(format_number(1000 * seconds) for seconds in each)
