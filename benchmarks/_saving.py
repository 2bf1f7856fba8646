"""A rank that trains and saves: how long training waits, how fast the bytes are durable, how steps slow down meanwhile.

In one process, taking turns: raw sequential writes of the same bytes, a synchronous save, and saves in the background:
in a thread, and in the process of the writer, each with a copy before the next step and during it. Every write ends
with fsync.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist

from meshwright.api.checkpoint import Retention
from meshwright.layout import Layout
from meshwright.models.presets import PRESETS
from meshwright_worker.checkpoint.async_save import AsyncCheckpointer
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.manifest import LayoutRecord, Manifest, TrainingState
from meshwright_worker.checkpoint.store import Tier
from meshwright_worker.checkpoint.writer_process import Executor, ThisProcess, start_writer
from meshwright_worker.distributed.mesh import Mesh

TENSORS = 240
"""Parameters and moments of 80 layers' matrices."""
BLOCK = 8 << 20
PASSES_SECONDS = 0.2
"""Time of a step before its update, in which a copy can be made."""
OPERATIONS = 1000
"""Small operations of a step, as a rank launches them on a device."""


def step() -> float:
    """The seconds of a step that keeps the interpreter busy, as launching kernels does."""
    started, tensor = time.perf_counter(), torch.ones(16)
    for _ in range(OPERATIONS):
        tensor = tensor * 1.0
    return time.perf_counter() - started


def steps_until(done: Callable[[], bool]) -> float:
    """The median seconds of a step until then."""
    seconds = [step()]
    while not done():
        seconds.append(step())
    return statistics.median(seconds)


def raw(path: Path, tensors: Mapping[str, torch.Tensor]) -> float:
    """Seconds of a sequential write of the tensors' bytes to one file."""
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for tensor in tensors.values():
            content = tensor.view(torch.uint8).numpy().data
            for first in range(0, len(content), BLOCK):
                file.write(content[first : first + BLOCK])
        os.fsync(file.fileno())
    return time.perf_counter() - started


def manifest(number: int) -> Manifest:
    """Of a checkpoint of one rank."""
    layout = LayoutRecord(tensor=1, pipeline=1, data=1, zero_stage=0)
    state = TrainingState(step=number)
    return Manifest(state=state, architecture=PRESETS["tiny"], seed=0, sequence_length=8, stream="made", layout=layout)


class Saves:
    """The saves of one way to write, with their seconds."""

    def __init__(
        self, name: str, directory: Path, executor: Executor, mesh: Mesh, *, trains: bool = True, overlaps: bool = False
    ) -> None:
        self.name, self._directory, self._number = name, directory, 0
        self._trains, self._overlaps = trains, overlaps
        self._saver = AsyncCheckpointer([Tier(CheckpointDirectory(directory), Retention(1))], mesh, executor)
        self.stall: list[float] = []
        self.durable: list[float] = []
        self.steps: list[float] = []

    def save(self, tensors: dict[str, torch.Tensor]) -> None:
        """Save once; if it trains, run steps until the save is durable, of which the first waits for the copy."""
        self._number += 1
        started = time.perf_counter()
        self._saver.begin(tensors, manifest(self._number), unchanged=tensors if self._overlaps else ())
        stall = time.perf_counter() - started
        thread = self._saver._thread
        assert thread is not None
        if self._trains:
            update = time.perf_counter() + PASSES_SECONDS
            passes = steps_until(lambda: time.perf_counter() > update)
            waits = time.perf_counter()
            self._saver.wait_for_copy()
            stall += time.perf_counter() - waits
            self.steps.append(statistics.median([passes, steps_until(lambda: not thread.is_alive())]))
        self.durable.append(self._saver.take_finished(wait=True)[0].seconds + stall)
        self.stall.append(stall if self._trains else self.durable[-1])
        for entry in self._directory.iterdir():
            shutil.rmtree(entry)


def measured(root: Path, mib: int, rounds: int) -> dict[str, Any]:
    """Every way to write, in turns; the first round, which allocates memory and plans, is reported apart."""
    writer = start_writer()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    mesh = cast(
        Mesh,
        SimpleNamespace(rank=0, layout=Layout(1, 1, 1), device=torch.device("cpu"), checkpoint_group=group),
    )
    elements = (mib << 20) // 4 // TENSORS
    tensors = {f"model.layers.{number}.weight": torch.full((elements,), float(number)) for number in range(TENSORS)}
    ways = [
        Saves("synchronous", root / "1", ThisProcess(), mesh, trains=False),
        Saves("thread", root / "2", ThisProcess(), mesh),
        Saves("thread, overlapped", root / "3", ThisProcess(), mesh, overlaps=True),
        Saves("process", root / "4", writer.executor(), mesh),
        Saves("process, overlapped", root / "5", writer.executor(), mesh, overlaps=True),
    ]
    raw_seconds, quiet = [], []
    for number in range(rounds + 1):
        os.sync()
        raw_seconds.append(raw(root / "raw", tensors))
        (root / "raw").unlink()
        quiet += [step() for _ in range(20)]
        turn = number % len(ways)
        for way in [*ways[turn:], *ways[:turn]]:
            os.sync()
            way.save(tensors)
    writer.close()
    size = sum(tensor.nbytes for tensor in tensors.values())
    return {
        "bytes": size,
        "raw_seconds": raw_seconds[1:],
        "quiet_step_seconds": statistics.median(quiet),
        "ways": {
            way.name: {
                "first_stall_seconds": way.stall[0],
                "stall_seconds": way.stall[1:],
                "durable_seconds": way.durable[1:],
                "step_seconds": way.steps[1:],
            }
            for way in ways
        },
    }


if __name__ == "__main__":
    print(json.dumps(measured(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
    sys.stdout.flush()
    os._exit(0)
