"""Ranks of a pipeline whose stages sleep instead of computing: executor, channels and processes are the real ones."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from meshwright.api.parallelism import PipelineSchedule
from meshwright.layout import Layout
from meshwright.schedules.actions import Schedule
from meshwright.schedules.registry import kind_of
from meshwright.schedules.simulator import ActionCosts
from meshwright_worker.data.batch import Batch
from meshwright_worker.distributed.mesh import CONTEXT, DATA, PIPELINE, TENSOR
from meshwright_worker.parallel.pipeline.auto_schedule import (
    MEASURED_STEPS,
    WARM_UP_STEPS,
    AutoScheduleExecutor,
    Stopwatch,
    TimedStage,
)
from meshwright_worker.parallel.pipeline.p2p import P2PChannels
from meshwright_worker.parallel.pipeline.rank_program import p2p_pairs
from meshwright_worker.parallel.pipeline.schedule_executor import ScheduleExecutor
from meshwright_worker.parallel.pipeline.stage import PipelineStage

WIDTH = 8


class SleepingChunk(PipelineStage):
    """A stage that takes a known time: each of its passes sleeps."""

    def __init__(self, index: int, stages: int, costs: ActionCosts) -> None:
        module = SimpleNamespace(is_last=index == stages - 1, compute=torch.float32, modules=list)
        self.stage = SimpleNamespace(index=index, module=module)
        self._costs = costs
        self._split: set[int] = set()
        self.busy = 0.0

    def _compute(self, seconds: float) -> None:
        began = time.monotonic()
        time.sleep(seconds)
        self.busy += time.monotonic() - began

    def forward(self, micro_batch: int, part: Batch, received: torch.Tensor | None, *, split: bool) -> torch.Tensor:
        self._compute(self._costs.forward)
        if split:
            self._split.add(micro_batch)
        return torch.zeros(()) if self.stage.module.is_last else torch.zeros(*part.tokens.shape, WIDTH)

    def backward(self, micro_batch: int, gradient: torch.Tensor | None) -> torch.Tensor:
        whole = 0.0 if micro_batch in self._split else self._costs.backward_weight
        self._compute(self._costs.backward_input + whole)
        return torch.zeros(1, 1, WIDTH)

    def weight(self, micro_batch: int, *, reduce: bool = False, last: bool = False) -> None:
        self._compute(self._costs.backward_weight)


class TimedSleepingChunk(TimedStage, SleepingChunk):
    """One whose passes stand under the worker's own stopwatch."""

    def __init__(self, index: int, stages: int, costs: ActionCosts, watch: Stopwatch) -> None:
        SleepingChunk.__init__(self, index, stages, costs)
        self._watch = watch


@dataclass(frozen=True)
class Took:
    """One rank's step, on the clock that all processes of a machine share."""

    start: float
    end: float
    busy: float


def measure(schedule: Schedule, costs: ActionCosts, steps: int, limit: int | None = None) -> list[list[Took]]:
    """Every rank's steps after those that warm up; `costs` are of one stage.

    With `limit`, micro-batches that a rank may hold, `schedule` is that of the first steps alone, which are measured.
    """
    ranks = len(schedule.ranks)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks._pipeline_ranks"])
    ends = []
    processes = []
    for rank in range(ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(theirs, rank, port, schedule, costs, steps, limit), daemon=True)
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    took = [end.recv() for end in ends]
    for process in processes:
        process.join()
    return took


def _rank(
    answer: Connection, rank: int, port: int, schedule: Schedule, costs: ActionCosts, steps: int, limit: int | None
) -> None:
    torch.set_num_threads(1)
    ranks = len(schedule.ranks)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    executor, chunks = executor_of(schedule, costs, rank, limit)
    parts = Batch.of(torch.zeros(schedule.micro_batches, 2, dtype=torch.int64)).chunk(schedule.micro_batches)
    for _ in range(1 if limit is None else WARM_UP_STEPS + MEASURED_STEPS):
        executor.run(parts)
    took = []
    for _ in range(steps):
        dist.barrier()
        start, before = time.monotonic(), sum(chunk.busy for chunk in chunks)
        executor.run(parts)
        took.append(Took(start, time.monotonic(), sum(chunk.busy for chunk in chunks) - before))
    answer.send(took)
    dist.destroy_process_group()


def executor_of(
    schedule: Schedule, costs: ActionCosts, rank: int, limit: int | None = None
) -> tuple[ScheduleExecutor, Sequence[SleepingChunk]]:
    """The executor of one rank, and the sleeping stages that it runs; the default process group must exist."""
    ranks = len(schedule.ranks)
    device_mesh = init_device_mesh("cpu", (1, ranks, 1, 1), mesh_dim_names=(DATA, PIPELINE, CONTEXT, TENSOR))
    mesh = SimpleNamespace(
        layout=Layout(pipeline=ranks),
        coordinates=Layout(pipeline=ranks).coordinates(rank),
        device=torch.device("cpu"),
        group=device_mesh.get_group,
        island_group=dist.group.WORLD,
    )
    transfers = P2PChannels(mesh, p2p_pairs(schedule))
    if limit is not None:
        watch = Stopwatch(mesh.device)
        timed = TimedSleepingChunk(rank, schedule.stages, costs, watch)
        kind = kind_of(PipelineSchedule.AUTOMATIC)
        return AutoScheduleExecutor(
            kind, timed, schedule, transfers, mesh, watch, limit=limit, width=WIDTH, slices=1
        ), [timed]
    held = sorted({action.stage for action in schedule.actions(rank)})
    chunks = [SleepingChunk(index, schedule.stages, costs) for index in held]
    return ScheduleExecutor(chunks, schedule, rank, transfers, width=WIDTH, slices=1), chunks


def bubble(took: list[list[Took]]) -> float:
    """Part of the time from the first start to the last end in which ranks wait: the best step's."""
    steps = list(zip(*took, strict=True))
    found = []
    for step in steps:
        makespan = max(one.end for one in step) - min(one.start for one in step)
        found.append(1 - sum(one.busy for one in step) / (len(step) * makespan))
    return min(found)
