"""1F1B (PipeDream-Flush, arXiv 2006.09503) by torch.distributed.pipelining.

The last stage computes the loss inside the model, so that logits are neither kept for all micro-batches nor returned.
All shapes are given: left to infer them, torch would run the model once more and send pickled descriptions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from meshwright.models.architecture import Architecture
from meshwright.protocol import RunConfig
from meshwright_worker.data.batch import Batch, Places
from meshwright_worker.mesh import PIPELINE, Mesh
from meshwright_worker.models.llama import DecoderStage
from meshwright_worker.pipeline.executor import tokens_of_step


class OneForwardOneBackward:
    """Runs one stage of a pipeline with the 1F1B schedule."""

    def __init__(self, stage: DecoderStage, run: RunConfig, model: Architecture, mesh: Mesh) -> None:
        if run.training is None:
            raise ValueError("`training` is required")
        self._stage = stage
        self._micro_batches = run.micro_batches
        self._places: Iterator[Places] = iter(())
        stage.register_forward_pre_hook(self._placed, with_kwargs=True)
        length = run.training.sequence_length
        batch = run.training.global_batch_size // run.data_parallel // run.micro_batches
        self._tokens = tokens_of_step(run.training)
        slices = run.tensor if run.parallelism.sequence else 1
        shape = (batch, length // slices, model.hidden_size)
        hidden = torch.empty(shape, dtype=stage.compute, device="meta", requires_grad=True)
        tokens = torch.empty(batch, length, dtype=torch.int64, device="meta")
        pipeline_stage = PipelineStage(
            stage,
            mesh.coordinates.pipeline,
            mesh.layout.pipeline,
            mesh.device,
            input_args=tokens if stage.is_first else hidden,
            output_args=torch.empty((), device="meta", requires_grad=True) if stage.is_last else hidden,
            group=mesh.devices.get_group(PIPELINE),
        )
        # The loss is scaled here, by all tokens of the step; the schedule must not divide gradients again.
        self._schedule = Schedule1F1B(pipeline_stage, run.micro_batches, loss_fn=self._mean, scale_grads=False)

    def run(self, batch: Batch) -> torch.Tensor:
        """See `Executor.run`."""
        losses: list[torch.Tensor] = []
        try:
            self._run_schedule(batch, losses)
        except RuntimeError as error:
            # torch wraps what a stage raised in a text about its shapes; a lost peer would look like a fault of ours.
            raise _root_of(error) from None
        return torch.stack(losses).detach().sum() if losses else torch.zeros((), device=batch.tokens.device)

    def _run_schedule(self, batch: Batch, losses: list[torch.Tensor]) -> None:
        targets = batch.targets
        # Every stage takes micro-batches in their order, forward.
        self._places = iter([part.places for part in batch.chunk(self._micro_batches)])
        if self._stage.is_first:
            self._schedule.step(batch.tokens, return_outputs=False)
        elif self._stage.is_last:
            self._schedule.step(targets=targets, target=targets, losses=losses, return_outputs=False)
        else:
            self._schedule.step(return_outputs=False)

    def _placed(self, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        return inputs, {**named, "places": next(self._places)}

    def _mean(self, loss_sum: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return loss_sum / self._tokens


def _root_of(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
