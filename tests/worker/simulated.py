"""One of many ranks, of which the others do not exist: its collectives return at once, without their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.protocol.run_config import NativeRun
from meshwright_worker.distributed.mesh import Mesh, build_mesh
from meshwright_worker.rank.task import RankTask


def task_of(run: NativeRun, rank: int) -> RankTask[NativeRun]:
    address = "127.0.0.1"
    return RankTask(run, 1, rank, run.layout.world_size, 0, 1, 0, address, 0, address, None, None)


@contextmanager
def simulated_mesh(run: NativeRun, rank: int) -> Iterator[Mesh]:
    """The mesh of one of many ranks, of which the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=run.layout.world_size)
    try:
        yield build_mesh(task_of(run, rank), torch.device("cpu"))
    finally:
        dist.destroy_process_group()
