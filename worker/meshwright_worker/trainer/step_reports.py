"""What a rank reports of each step: results, times, memory, and floating-point operations.

A report compares the floating-point operations of a step with the peak of the GPUs. Model FLOPs (for MFU, arXiv
2204.02311) are 6·N + 12·L·d·s per token; with adapters, frozen parameters count 4·N. Hardware FLOPs (for HFU) add
recomputation by activation checkpointing and `parallelism.rematerialize`, as entire forward passes. Both are compared
with the dense bf16 peak, for every number format, so that runs are comparable. If the GPU is unknown, there is no peak
and no utilization.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from meshwright.api.training import ActivationCheckpointing, TrainingSpec
from meshwright.models.architecture import Architecture
from meshwright.models.counts import forward_pass_flops, recomputed_layers_flops, training_flops
from meshwright.planner.cost.accelerators import accelerator
from meshwright.protocol.run_config import NativeRun
from meshwright.schedules.measured import RankTimeline
from meshwright_worker.checkpoint.manager import CheckpointManager
from meshwright_worker.checkpoint.manifest import TrainingState
from meshwright_worker.distributed.mesh import Mesh
from meshwright_worker.distributed.step_clock import Part
from meshwright_worker.memory.peaks import memory_peaks
from meshwright_worker.rank.task import StepReport, StepTimes
from meshwright_worker.trainer.async_pipeline_trainer import AsyncPipelineTrainer
from meshwright_worker.trainer.micro_batches import TokenCounts
from meshwright_worker.trainer.step_times import simulated_bubble, step_times
from meshwright_worker.trainer.trainer import StepResult, Trainer

_RECOMPUTES_LAYERS = (ActivationCheckpointing.FULL, ActivationCheckpointing.EVERY_K, ActivationCheckpointing.SQRT)
"""`Selective` stores the result of every matrix product: what it recomputes does not count in FLOPs."""


class StepReports:
    """Builds the report of each step."""

    def __init__(
        self,
        run: NativeRun,
        mesh: Mesh,
        trainer: Trainer | AsyncPipelineTrainer,
        checkpoint_manager: CheckpointManager | None,
    ) -> None:
        self._training, self._islands = run.training, run.islands
        self._mesh, self._trainer, self._checkpoint_manager = mesh, trainer, checkpoint_manager
        self._step_flops = partial(
            step_flops,
            run.architecture,
            self._training,
            mesh.layout.world_size,
            mesh.device,
            rematerializes=run.parallelism.rematerialize,
        )
        self._full_row_flops = self._step_flops()
        self._reported_stall = 0.0
        self._simulated_bubble = simulated_bubble(run) if mesh.rank == 0 else None

    def report(
        self,
        result: StepResult,
        state: TrainingState,
        seconds: float,
        data_seconds: float,
        parts: Mapping[Part, float],
        stall_seconds: float,
    ) -> StepReport:
        """Build the report of a step.

        Args:
            result: its result.
            state: the state after the latest step, which may be a later one.
            seconds: its time.
            data_seconds: the part of it in which it waited for samples.
            parts: what the clock has measured since the last report.
            stall_seconds: time for which steps have stood still for checkpoints so far.
        """
        tokens, flops = self._training.global_batch_size * self._training.sequence_length, self._full_row_flops
        if result.token_counts is not None:
            # Islands exchange results only after a round: multiply this island's counts instead.
            token_counts = TokenCounts(
                result.token_counts.tokens * self._islands, result.token_counts.squares * self._islands
            )
            tokens, flops = token_counts.tokens, self._step_flops(token_counts)
        return StepReport(
            step=result.step,
            loss=result.loss,
            gradient_norm=result.gradient_norm,
            learning_rate=result.learning_rate,
            tokens=tokens,
            samples=state.samples - (state.step - result.step) * self._training.global_batch_size,
            seconds=seconds,
            data_seconds=data_seconds,
            model_flops=flops.model,
            hardware_flops=flops.hardware,
            peak_flops=flops.peak,
            checkpoint_stall_seconds=stall_seconds,
            experts=result.experts,
            pipeline_bubble=result.bubble,
            skipped=result.skipped,
            memory=memory_peaks(self._mesh.device),
            times=self._times(parts, stall_seconds),
            timeline=self._timeline(),
            tiers=self._checkpoint_manager.reports() if self._checkpoint_manager is not None else None,
            simulated_bubble=result.bubble if result.bubble is not None else self._simulated_bubble,
        )

    def _timeline(self) -> RankTimeline | None:
        """The slots of the step that was timed last, once."""
        recorder = self._trainer.slot_recorder
        return recorder.take() if recorder is not None else None

    def _times(self, parts: Mapping[Part, float], stall_seconds: float) -> StepTimes:
        """The times since the last report."""
        stall, self._reported_stall = stall_seconds - self._reported_stall, stall_seconds
        return step_times(parts, checkpoint=stall, stages=self._mesh.layout.pipeline)


@dataclass(frozen=True, slots=True)
class StepFlops:
    """The operations of one step of the entire job."""

    model: float
    hardware: float
    peak: float | None
    """FLOP/s of all of the job's GPUs; None if they are not known."""


def step_flops(
    architecture: Architecture,
    training: TrainingSpec,
    ranks: int,
    device: torch.device,
    token_counts: TokenCounts | None = None,
    *,
    rematerializes: bool = False,
) -> StepFlops:
    """Return the operations of one step on `ranks` devices of this rank's type.

    `token_counts` is the content of the rows, if they are padded. `rematerializes` says whether pipeline stages
    recompute their forward pass. Padding does not count as work, even where it is computed.
    """
    tokens, length, lora = (
        training.global_batch_size * training.sequence_length,
        training.sequence_length,
        training.lora,
    )
    if token_counts is not None:
        # FLOPs per token are linear in the row's length, so rows of different lengths count as rows of this mean
        # length.
        tokens, length = token_counts.tokens, round(token_counts.squares / max(1, token_counts.tokens))
    model = training_flops(architecture, length, lora=lora)
    recomputed = forward_pass_flops(architecture, length, lora) if rematerializes else 0.0
    if training.checkpointing in _RECOMPUTES_LAYERS:
        recomputed += recomputed_layers_flops(architecture, length, lora)
    gpu = accelerator(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return StepFlops(tokens * model, tokens * (model + recomputed), gpu.half * ranks if gpu else None)
