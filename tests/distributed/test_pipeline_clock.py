"""The executor on a virtual clock: stages take no time but say in what they send when it was made.

Each stage begins when its rank is free and what it needs was made; so what the ranks say at the end is the schedule's
timeline as the real executor and the real channels ran it, to the last digit, on a machine however busy.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.schedules.actions import Schedule
from meshwright.schedules.automatic import automatic
from meshwright.schedules.registry import NAMES, generate
from meshwright.schedules.simulator import ActionCosts, simulate
from meshwright_worker.data.batch import Batch
from meshwright_worker.distributed.mesh import join_mesh
from meshwright_worker.parallel.pipeline.p2p import P2PChannels
from meshwright_worker.parallel.pipeline.rank_program import p2p_pairs
from meshwright_worker.parallel.pipeline.schedule_executor import ScheduleExecutor
from meshwright_worker.rank.task import RankTask
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool

RANKS, MICRO_BATCHES = 4, 8
COSTS = ActionCosts(1.0, 1.2, 0.8)


@dataclass
class Clock:
    """When this rank is free."""

    now: float = 0.0

    def take(self, made: torch.Tensor | None, seconds: float) -> torch.Tensor:
        begun = self.now if made is None else max(self.now, float(made.max()))
        self.now = begun + seconds
        return torch.full((1, 2, 1), self.now, dtype=torch.float64)


class ClockedChunk:
    """What `Chunk` offers to the executor."""

    def __init__(self, index: int, stages: int, clock: Clock) -> None:
        module = SimpleNamespace(is_last=index == stages - 1, compute=torch.float64, modules=tuple)
        self.stage = SimpleNamespace(index=index, module=module)
        self._clock = clock
        self._split: set[int] = set()

    def forward(self, micro_batch: int, part: Batch, received: torch.Tensor | None, *, split: bool) -> torch.Tensor:
        self._split |= {micro_batch} if split else set()
        made = self._clock.take(received, COSTS.forward)
        return torch.zeros(()) if self.stage.module.is_last else made

    def backward(self, micro_batch: int, gradient: torch.Tensor | None) -> torch.Tensor:
        weights = 0.0 if micro_batch in self._split else COSTS.backward_weight
        return self._clock.take(gradient, COSTS.backward_input + weights)

    def weight(self, micro_batch: int, *, reduce: bool = False, last: bool = False) -> None:
        self._clock.take(None, COSTS.backward_weight)


def run_on_the_clock(task: RankTask, schedule: Schedule) -> float:
    with join_mesh(task) as mesh:
        clock = Clock()
        rank = mesh.coordinates.pipeline
        held = sorted({action.stage for action in schedule.actions(rank)})
        chunks: list[Any] = [ClockedChunk(index, schedule.stages, clock) for index in held]
        executor = ScheduleExecutor(chunks, schedule, rank, P2PChannels(mesh, p2p_pairs(schedule)), width=1, slices=1)
        executor.run(Batch.of(torch.zeros(MICRO_BATCHES, 3, dtype=torch.int64)).chunk(MICRO_BATCHES))
        return clock.now


def made(name: str) -> Schedule:
    if name == "automatic":
        return automatic(RANKS, MICRO_BATCHES, 2 * RANKS - 1, COSTS)
    return generate(name, RANKS, MICRO_BATCHES, 2 if name in ("interleaved", "looped-bfs") else 1)


@pytest.mark.parametrize("name", [*NAMES, "automatic"])
def test_the_executor_runs_the_simulators_timeline(pool: RankPool, name: str) -> None:
    schedule = made(name)
    run = small_run(pipeline=RANKS, micro_batches=MICRO_BATCHES, layers=8)
    ends = pool.run(run_on_the_clock, run, schedule)
    simulation = simulate(schedule.serialized(), COSTS)
    assert ends == pytest.approx([ran[-1].end for ran in simulation.timeline], rel=1e-12)


def test_zero_bubble_and_both_ways_wait_less_than_1f1b(pool: RankPool) -> None:
    run = small_run(pipeline=RANKS, micro_batches=MICRO_BATCHES, layers=8)
    part = {}
    for name in ("1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v"):
        schedule = made(name)
        ends = pool.run(run_on_the_clock, run, schedule)
        busy = [simulate(schedule, COSTS).busy(rank) for rank in range(RANKS)]
        part[name] = 1 - sum(busy) / (RANKS * max(ends))
    assert all(part[name] < part["1f1b"] for name in part if name != "1f1b"), part
