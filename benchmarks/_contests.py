"""Our training step and a bare loop, in the same processes, on the same batches, in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._pairs import in_turns
from benchmarks._plain_loops import Loop, plain_loop
from meshwright.api.data import DataSource, DataSpec
from meshwright.api.parallelism import ParallelismSpec, PipelineSchedule
from meshwright.api.training import TrainingSpec
from meshwright.data.tokenizers import BYTE_SEPARATOR
from meshwright.models.architecture import Architecture
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.data.batch import Batch, make_batch
from meshwright_worker.data.prefetch import pin_batch
from meshwright_worker.distributed.mesh import Mesh, join_mesh
from meshwright_worker.rank.task import RankTask
from meshwright_worker.trainer.trainer import Trainer

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""`cpu` counts this process alone: what a busy machine disturbs less, and what does not see waiting."""
_DIFFERENT_TEXTS = 4
_SAME = 1e-4
"""Relative difference of losses up to which two loops do the same work."""


@dataclass(frozen=True)
class Times:
    """Seconds of each measurement on one rank, pair by pair."""

    ours: list[float]
    theirs: list[float]


class OurLoop:
    """The worker's own step, as its training loop calls it."""

    def __init__(self, run: NativeRun, mesh: Mesh, *, draw: bool = True) -> None:
        self._data, self._device = run.data, mesh.device
        self.trainer = Trainer(run, mesh, draw=draw)
        self._share = run.training.global_batch_size // mesh.layout.data
        self._first = self._share * mesh.coordinates.data

    def batch(self, samples: torch.Tensor) -> Batch:
        """A step's batch, page-locked for a GPU, as the training loop's thread makes it during the step before."""
        own = samples[self._first :][: self._share]
        numbers = range(self._first, self._first + self._share)
        return pin_batch(make_batch(own, self._data, BYTE_SEPARATOR, numbers), self._device)

    def step(self, number: int, samples: torch.Tensor) -> float:
        """See `Loop.step`."""
        return self.trainer.step(number, self.batch(samples)).loss


class _Timed:
    """Runs a loop for a number of steps and says how long they took."""

    def __init__(self, loop: Loop, texts: list[torch.Tensor], steps: int, clock: str, *, repeatable: bool) -> None:
        self._loop, self._texts, self._steps = loop, texts, steps
        self._clock = CLOCKS[clock]
        self._repeatable = repeatable
        self._number = 0

    def step(self) -> float:
        self._number += 1
        return self._loop.step(self._number, self._texts[self._number % len(self._texts)])

    def __call__(self) -> float:
        # The worker asks torch for repeatable kernels; a bare loop has torch's defaults.
        torch.use_deterministic_algorithms(self._repeatable, warn_only=True)
        dist.barrier()
        began = self._clock()
        for _ in range(self._steps):
            self.step()
        dist.barrier()
        return self._clock() - began


def contest(task: RankTask, pairs: int, steps: int, clock: str = "wall") -> Times:
    """Time `pairs` pairs of `steps` steps on this rank.

    Raises:
        ArithmeticError: the losses differ, so the two do not do the same work.
    """
    model, training = task.run.architecture, task.run.training
    with join_mesh(task) as mesh:
        texts = [random_tokens(model, training, seed) for seed in range(_DIFFERENT_TEXTS)]
        ours = _Timed(OurLoop(task.run, mesh), texts, steps, clock, repeatable=True)
        theirs = _Timed(plain_loop(task.run, mesh.rank, mesh.device), texts, steps, clock, repeatable=False)
        for _ in range(2):
            losses = ours.step(), theirs.step()
            if abs(losses[0] - losses[1]) > _SAME * abs(losses[1]):
                raise ArithmeticError(f"losses {losses[0]} and {losses[1]}: the two do not do the same work")
        gc.collect()
        return Times(*in_turns(ours, theirs, pairs))


def random_tokens(model: Architecture, training: TrainingSpec, seed: int) -> torch.Tensor:
    """A global batch, int64 [batch, length + 1]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (training.global_batch_size, training.sequence_length + 1)
    return torch.randint(0, model.vocab_size, shape, generator=generator)


def run_of(
    model: Architecture, training: dict[str, Any], *, data: int = 1, pipeline: int = 1, micro_batches: int = 1
) -> NativeRun:
    """A run of random tokens: `data` replicas share everything (ZeRO-3), `pipeline` stages run 1F1B. `training` has
    fields by their names on the wire; those of its optimizer are added to the benchmarks' own.
    """
    optimizer = {"learningRate": 1e-4, "warmupSteps": 10, **training.get("optimizer", {})}
    return NativeRun(
        tensor=1,
        pipeline=pipeline,
        data_parallel=data,
        micro_batches=micro_batches,
        parallelism=ParallelismSpec(zero_stage=3 if data > 1 else 0, schedule=PipelineSchedule.ONE_F_ONE_B),
        architecture=model,
        data=DataSpec(source=DataSource.PYTHON_STDLIB),
        training=TrainingSpec.model_validate({"steps": 1_000_000, **training, "optimizer": optimizer}),
    )
