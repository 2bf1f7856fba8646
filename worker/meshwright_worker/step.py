"""One optimizer step on all ranks: gradients, one small reduction that tells every rank everything, the update."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.api.spec import TrainingSpec
from meshwright.models.architecture import Architecture
from meshwright.protocol import RunConfig
from meshwright_worker.mesh import Mesh
from meshwright_worker.models.llama import DecoderStage
from meshwright_worker.optimizer import AdamW, learning_rate
from meshwright_worker.parallel.apply import build_stage
from meshwright_worker.parallel.gradients import clip, reduce_gradients, square_sum
from meshwright_worker.parallel.shards import shards_of
from meshwright_worker.pipeline.accumulate import Accumulation
from meshwright_worker.pipeline.executor import Executor
from meshwright_worker.pipeline.one_f_one_b import OneForwardOneBackward


class DivergedError(ArithmeticError):
    """Loss or gradients are no longer finite numbers."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step came to; the same numbers on every rank."""

    loss: float
    """Mean loss per token of the global batch, before the update."""
    gradient_norm: float
    """Global norm, before clipping."""
    learning_rate: float
    stop: bool
    """Whether any rank was asked to stop."""


class Trainer:
    """The model's stage, its optimizer and the way to run them on this rank."""

    def __init__(self, run: RunConfig, model: Architecture, training: TrainingSpec, mesh: Mesh) -> None:
        self._mesh = mesh
        self._training = training
        self.stage, distributed = build_stage(run, model, mesh)
        self.shards = shards_of(self.stage, distributed, run, mesh)
        self.optimizer = AdamW(self.shards, training.optimizer)
        self._executor = _executor(self.stage, run, model, mesh)

    def step(self, number: int, samples: torch.Tensor, *, stop: bool = False) -> StepResult:
        """Train on this replica's samples of step `number` (from 1), int64 [batch, sequence_length + 1].

        `stop` is this rank's wish to stop after the step; the result says whether any rank has it, so all ranks act
        alike.

        Raises:
            DivergedError: loss or gradients are not finite; no parameter was changed.
        """
        replica_loss = self._executor.run(samples.to(self._mesh.device))
        gradients = reduce_gradients(self.shards, self._mesh)
        loss, norm, stopping = self._agree(replica_loss, square_sum(self.shards, gradients), stop)
        if not math.isfinite(loss + norm):
            raise DivergedError(
                f"step {number}: loss {loss}, gradient norm {norm}; a lower `training.optimizer.learningRate`, longer "
                "`warmupSteps` or a smaller `gradientClip` may help"
            )
        optimizer = self._training.optimizer
        clip(gradients, norm, optimizer.gradient_clip)
        rate = learning_rate(number, self._training.steps, optimizer)
        self.optimizer.step(gradients, rate)
        return StepResult(loss, norm, rate, stopping)

    def _agree(self, replica_loss: torch.Tensor, squares: torch.Tensor, stop: bool) -> tuple[float, float, bool]:
        # Loss, squared norm and the stop flag travel in one reduction: one small collective a step.
        mesh = self._mesh
        counts = mesh.is_last_stage and mesh.coordinates.tensor == 0
        loss = replica_loss.double() / mesh.layout.data if counts else torch.zeros_like(squares)
        sums = torch.stack([loss, squares, torch.full_like(squares, float(stop))])
        dist.all_reduce(sums)
        total_loss, total_squares, stops = sums.tolist()
        return total_loss, math.sqrt(total_squares), stops > 0


def _executor(stage: DecoderStage, run: RunConfig, model: Architecture, mesh: Mesh) -> Executor:
    if run.pipeline == 1:
        return Accumulation(stage, run.micro_batches)
    return OneForwardOneBackward(stage, run, model, mesh)
