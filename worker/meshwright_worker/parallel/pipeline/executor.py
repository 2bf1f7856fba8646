"""Executors, which run a step's micro-batches for the training loop: their interface, and the choice of one.

This is the only module that knows every executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from meshwright.api.training import TrainingSpec
from meshwright.protocol.run_config import NativeRun
from meshwright.schedules.actions import Schedule
from meshwright.schedules.pipeline_layout import activation_limit
from meshwright.schedules.registry import kind_of
from meshwright_worker.data.batch import Batch
from meshwright_worker.distributed.mesh import Mesh
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.parallel.data.fsdp import (
    disable_gradient_sync,
    enable_gradient_sync,
    reduces_every_micro_batch,
    reshard,
)
from meshwright_worker.parallel.parallelize import LocalStage, pipeline_layout_of
from meshwright_worker.parallel.pipeline.auto_schedule import AutoScheduleExecutor, Stopwatch, TimedStage
from meshwright_worker.parallel.pipeline.p2p import P2PChannels
from meshwright_worker.parallel.pipeline.rank_program import p2p_pairs
from meshwright_worker.parallel.pipeline.schedule_executor import ScheduleExecutor
from meshwright_worker.parallel.pipeline.shared_weights import SharedWeights
from meshwright_worker.parallel.pipeline.slot_times import SlotRecorder, slot_recorder
from meshwright_worker.parallel.pipeline.stage import PipelineStage


class Executor(Protocol):
    """Runs forward and backward of one replica's micro-batches and leaves gradients in the parameters."""

    bubble: float | None
    """Share of a step in which ranks are idle, simulated with measured times; None without measurements."""
    recorder: SlotRecorder | None
    """Times the slots of some steps; None without a pipeline, and on ranks that do not report them."""

    def run(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Add the gradient of the replica's summed loss over `tokens_of_step`.

        Args:
            micro_batches: the replica's micro-batches on the rank's device, as many as the schedule has. They may
                differ in rows and length, but must be the same on all ranks of a replica.

        Returns:
            That quotient, fp32 []; 0 on ranks that do not compute the loss.
        """

    def evaluate(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Return the replica's loss, summed over its targets and not divided, fp32 []; computes no gradients.

        0 on ranks that do not compute the loss, as in `run`.
        """


def tokens_of_step(training: TrainingSpec) -> int:
    """Return the maximum number of targets in a step: every loss is divided by it before its backward pass.

    The actual number of targets is known only after a reduction over the mesh. Until then this number keeps gradients
    in a range that any format can represent, and the step corrects it (`Trainer.step`).
    """
    return training.global_batch_size * training.sequence_length


class GradientAccumulation:
    """Runs micro-batches one after the other, for a model that is not split into stages.

    Sums their gradients. FSDP reduces them only with the last one, or each of them.

    Args:
        stage: the entire model.
        tokens: the divisor of the summed loss, `tokens_of_step`.
        reduces_each: whether FSDP reduces gradients in each micro-batch.
    """

    bubble: float | None = None
    recorder: SlotRecorder | None = None

    def __init__(self, stage: DecoderStage, tokens: int, *, reduces_each: bool = False) -> None:
        self._stage = stage
        self._tokens = tokens
        self._reduces_each = reduces_each

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """See `Executor.evaluate`."""
        total = torch.zeros((), device=micro_batches[0].tokens.device)
        for part in micro_batches:
            total = total + self._stage(part.tokens, targets=part.targets, token_metadata=part.token_metadata)
        reshard(self._stage)
        return total

    def run(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """See `Executor.run`."""
        total = torch.zeros((), device=micro_batches[0].tokens.device)
        for number, part in enumerate(micro_batches, start=1):
            last = number == len(micro_batches)
            if last or self._reduces_each:
                enable_gradient_sync(self._stage, last=last)
            else:
                disable_gradient_sync(self._stage)
            loss = self._stage(part.tokens, targets=part.targets, token_metadata=part.token_metadata) / self._tokens
            loss.backward()
            total = total + loss.detach()
        return total


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The executor of this rank's stages, and their shared weights."""

    executor: Executor
    shared_weights: SharedWeights


def build_executor(stages: Sequence[LocalStage], run: NativeRun, mesh: Mesh) -> Pipeline:
    """Build the executor for a run's schedule. Collective over the world."""
    pipeline, rank, tied = pipeline_layout_of(run), mesh.coordinates.pipeline, run.architecture.tie_embeddings
    tokens = tokens_of_step(run.training)
    if run.pipeline == 1 and len(stages) == 1 and not run.parallelism.rematerialize:
        executor = GradientAccumulation(stages[0].module, tokens, reduces_each=reduces_every_micro_batch(run))
        return Pipeline(executor, SharedWeights(pipeline, rank, None, tied=tied))
    p2p_channels = P2PChannels(mesh, p2p_pairs(pipeline.schedule))
    return Pipeline(
        _build_schedule_executor(stages, run, mesh, pipeline.schedule, p2p_channels, tokens),
        SharedWeights(pipeline, rank, p2p_channels, tied=tied),
    )


def _build_schedule_executor(
    stages: Sequence[LocalStage],
    run: NativeRun,
    mesh: Mesh,
    schedule: Schedule,
    p2p_channels: P2PChannels,
    tokens: int,
) -> ScheduleExecutor:
    kind = kind_of(run.parallelism.order)
    width, again = run.architecture.hidden_size, run.parallelism.rematerialize
    slices, each = run.tensor if run.parallelism.sequence else 1, reduces_every_micro_batch(run)
    recorder = slot_recorder(mesh, max(len(slots) for slots in schedule.ranks))
    if kind.measures_costs and run.pipeline > 1:
        watch = Stopwatch(mesh.device)
        timed = TimedStage(stages[0], tokens, rematerialize=again, watch=watch)
        limit = activation_limit(run.parallelism, run.pipeline)
        return AutoScheduleExecutor(
            kind,
            timed,
            schedule,
            p2p_channels,
            mesh,
            watch,
            limit=limit,
            width=width,
            slices=slices,
            reduces_each=each,
            recorder=recorder,
        )
    pipeline_stages = [PipelineStage(stage, tokens, rematerialize=again) for stage in stages]
    return ScheduleExecutor(
        pipeline_stages,
        schedule,
        mesh.coordinates.pipeline,
        p2p_channels,
        width=width,
        slices=slices,
        reduces_each=each,
        recorder=recorder,
    )
