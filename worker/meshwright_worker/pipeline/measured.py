"""The schedule `Automatic`: its passes are timed in the first steps, and the next ones run in an order for these times.

The times are the clock's, and so is the order; the numbers are not: whatever the order, a stage adds up its gradients
micro-batch by micro-batch (`schedules.automatic`). So a repeated or resumed run, which measures other times, trains the
same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from meshwright.schedules.actions import Kind, Schedule
from meshwright.schedules.measured import Report, Times, agreed, improved, rounded
from meshwright.schedules.simulate import Costs, simulate
from meshwright_worker.data.batch import Batch
from meshwright_worker.mesh import Mesh
from meshwright_worker.parallel.collectives import all_gather_into
from meshwright_worker.pipeline.channels import Channels
from meshwright_worker.pipeline.scheduled import Scheduled
from meshwright_worker.pipeline.timed import Stopwatch, TimedChunk

log = logging.getLogger(__name__)

WARM_UP, MEASURED = 1, 2
"""Steps of a process before passes are timed, which compile, connect and take memory; and steps whose passes are."""
_SENDS = 5
"""How often a send is timed, after one that makes both ends meet."""
_HOP = "hop"


class Measured(Scheduled):
    """The executor of a rank that follows a searched order, one stage a rank.

    Args:
        chunk: this rank's stage.
        schedule: of the first steps, within `limit`.
        channels: to the other ranks of the pipeline.
        mesh: whose ranks that take every step together agree on the times.
        watch: under which the chunk's passes stand.
        limit: most micro-batches whose activations a rank may hold.
        width: of the hidden states.
        slices: into how many parts the positions of hidden states are split over a tensor group.
    """

    def __init__(
        self,
        chunk: TimedChunk,
        schedule: Schedule,
        channels: Channels,
        mesh: Mesh,
        watch: Stopwatch,
        *,
        limit: int,
        width: int,
        slices: int,
    ) -> None:
        super().__init__([chunk], schedule, mesh.coordinates.pipeline, channels, width=width, slices=slices)
        self._stage = chunk.stage
        self._mesh, self._watch, self._limit = mesh, watch, limit
        self._steps = 0
        self.times: Times | None = None
        """What was measured and agreed upon, in seconds."""

    def run(self, parts: Sequence[Batch]) -> torch.Tensor:
        """See `Executor.run`. Collective over the ranks that take every step together."""
        self._steps += 1
        self._watch.running = WARM_UP < self._steps <= WARM_UP + MEASURED
        total = super().run(parts)
        if self._steps == WARM_UP + MEASURED:
            self._time_sends(parts[0])
            self._watch.running = False
            self._search()
        return total

    def _time_sends(self, part: Batch) -> None:
        """Exchange hidden states with both neighbours, in pairs: first the even ranks with the next ones."""
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
        self.times = times = self._agree()
        before = self.schedule
        self.follow(improved(before, self._limit, rounded(times)))
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

    def _agree(self) -> Times:
        """The times that every rank has then, to the last bit."""
        group, device = self._mesh.together, self._mesh.device
        seconds = [self._watch.seconds(what) for what in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT, _HOP)]
        own = torch.tensor(seconds, dtype=torch.float64, device=device)
        everyones = own.new_empty(dist.get_world_size(group), len(seconds))
        all_gather_into(everyones, own, group)
        reports = []
        for rank, row in zip(dist.get_process_group_ranks(group), everyones.tolist(), strict=True):
            *costs, hop = row
            reports.append(Report(self._mesh.layout.coordinates(rank).pipeline, Costs(*costs), hop))
        return agreed(reports, self.schedule.stages)


def _milliseconds(costs: Costs) -> str:
    each = (costs.forward, costs.backward_input, costs.backward_weight)
    return "/".join(f"{1000 * seconds:.3g}" for seconds in each)
