"""Builds one rank of a large job in this process, without the others: how long it takes, and how much memory.

    python -m benchmarks.one_rank --model llama-3.1-405b --tensor 8 --pipeline 16 --data 128

The process groups are torch's fake ones, whose collectives return at once. With `--device meta` parameters have no
memory, and drawing counts the numbers that it would store; with `--device cpu` this rank's shards are allocated and
drawn.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.api.data import DataSource, DataSpec
from meshwright.api.data_parallel import DataParallelSpec, DataParallelStrategy
from meshwright.api.parallelism import ParallelismSpec, PipelineSchedule
from meshwright.api.precision import Precision
from meshwright.api.training import TrainingSpec
from meshwright.models.presets import PRESETS
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.distributed.mesh import Mesh, build_mesh
from meshwright_worker.parallel.data.data_parallel import build_data_parallel
from meshwright_worker.parallel.parallelize import build_stages
from meshwright_worker.parallel.pipeline.executor import build_executor
from meshwright_worker.parallel.shards import ParameterShard
from meshwright_worker.parallel.stage_shards import parameter_shards
from meshwright_worker.rank.task import RankTask
from meshwright_worker.trainer.initial_state import draw_shards


@dataclass(frozen=True)
class OneRank:
    """What one rank costs."""

    ranks: int
    rank: int
    elements: int
    """Elements of the parameters that it updates."""
    drawn: int
    """Random numbers that it draws for them."""
    groups_seconds: float
    """CPU time to create its process groups; likewise below. Nothing is waited for."""
    build_seconds: float
    draw_seconds: float
    shard_gigabytes: float
    """Memory of its parameters; 0 on the meta device."""
    host_gigabytes: float
    """Growth of the process's largest resident memory, without its parameters."""


def main() -> None:
    """Print the result as JSON."""
    arguments = _parser().parse_args()
    print(json.dumps(asdict(measure(run_of(arguments), arguments.rank, torch.device(arguments.device))), indent=2))


def run_of(arguments: argparse.Namespace) -> NativeRun:
    """The run of these arguments, in bf16 with 1F1B."""
    flat = DataParallelSpec(strategy=DataParallelStrategy.ZERO)
    return NativeRun(
        architecture=PRESETS[arguments.model],
        training=TrainingSpec(
            steps=10,
            global_batch_size=arguments.data * arguments.micro_batches,
            sequence_length=8192,
            precision=Precision.BF16,
        ),
        tensor=arguments.tensor,
        pipeline=arguments.pipeline,
        data_parallel=arguments.data,
        micro_batches=arguments.micro_batches,
        parallelism=ParallelismSpec(
            zero_stage=arguments.zero,
            schedule=PipelineSchedule.ONE_F_ONE_B,
            data_parallel=flat if arguments.zero < 3 else DataParallelSpec(),
        ),
        data=DataSpec(source=DataSource.FILES, claim_name="text"),
    )


def measure(run: NativeRun, rank: int, device: torch.device) -> OneRank:
    """Build one rank of a run on this device, and draw its initial weights."""
    before = _resident_gigabytes()
    with _fake_mesh(run, rank, device) as (mesh, groups_seconds), _counting_draws() as drawn:
        started = time.process_time()
        shards = _build(run, mesh)
        built = time.process_time()
        draw_shards(shards, run)
        ended = time.process_time()
        stored = sum(shard.local.nbytes for shard in shards) / 1e9 if device.type != "meta" else 0.0
        return OneRank(
            ranks=run.layout.world_size,
            rank=rank,
            elements=sum(shard.local.numel() for shard in shards),
            drawn=drawn(),
            groups_seconds=groups_seconds,
            build_seconds=built - started,
            draw_seconds=ended - built,
            shard_gigabytes=stored,
            host_gigabytes=_resident_gigabytes() - before - stored,
        )


def _build(run: NativeRun, mesh: Mesh) -> list[ParameterShard]:
    stages = build_stages(run, mesh, draw=False)
    pipeline = build_executor(stages, run, mesh)
    shards = [(s.index, shard) for s in stages for shard in parameter_shards(s.module, s.distributed, run, mesh)]
    trained = pipeline.shared_weights.deduplicate(shards)
    return list(build_data_parallel(run, [stage.module for stage in stages], trained, mesh).shards)


@contextmanager
def _fake_mesh(run: NativeRun, rank: int, device: torch.device) -> Iterator[tuple[Mesh, float]]:
    """The mesh of one rank, and the seconds to build it."""
    world = run.layout.world_size
    task = RankTask(run, 1, rank, world, 0, 1, 0, "127.0.0.1", 0, "127.0.0.1", None, None)
    started = time.process_time()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        mesh = build_mesh(task, torch.device("cpu"))
        yield replace(mesh, device=device), time.process_time() - started
    finally:
        dist.destroy_process_group()


@contextmanager
def _counting_draws() -> Iterator[Callable[[], int]]:
    """Count the elements that are drawn."""
    counts: list[int] = []
    normal = torch.Tensor.normal_

    def counted(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        counts.append(0 if tensor.is_meta else tensor.numel())
        return normal(tensor, *arguments, **options)

    torch.Tensor.normal_ = counted  # type: ignore[assignment, method-assign]
    try:
        yield lambda: sum(counts)
    finally:
        torch.Tensor.normal_ = normal  # type: ignore[method-assign]


def _resident_gigabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3.1-405b")
    parser.add_argument("--tensor", type=int, default=8)
    parser.add_argument("--pipeline", type=int, default=16)
    parser.add_argument("--data", type=int, default=128)
    parser.add_argument("--zero", type=int, default=3, choices=(1, 3))
    parser.add_argument("--micro-batches", type=int, default=32)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--device", default="meta", choices=("meta", "cpu"))
    return parser


if __name__ == "__main__":
    main()
