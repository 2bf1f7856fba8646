"""Pipelines that never drain between steps: PipeDream and PipeDream-2BW.

Stage s of P runs 1F1B over an endless row of micro-batches: once P - 1 - s of them are on their way beyond it, one
forward pass, one backward pass. When the last backward pass of a step is done the stage updates its own weights,
without waiting for others. Counting updates since the pipeline was last empty, the gradient of step t is taken

- by PipeDream (arXiv 1806.03377, section 3.3, weight stashing) at version t - P + s of the weights of stage s;
- by PipeDream-2BW (arXiv 2006.09503, section 3.1) at version t - 2 in every stage;

at 0 where that is negative, and is applied to version t - 1. Forward and backward pass see the same version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright_worker.data.batch import Batch
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.parallel.pipeline.p2p import P2PChannels
from meshwright_worker.parallel.pipeline.weight_stashing import WeightStash


@dataclass(slots=True)
class _InFlightMicroBatch:
    """A micro-batch between its forward and its backward pass."""

    step: int
    version: int
    last: bool
    """Whether it is the last of its step."""
    input: torch.Tensor
    output: GradientEdge
    output_grad: torch.Tensor | None
    gradient_shape: torch.Size


class PipeDreamPipeline:
    """One stage in a pipeline that is not drained.

    Args:
        stage: the stage's module.
        stage_index: this rank among the pipeline's.
        stage_count: how many there are.
        double_buffered: PipeDream-2BW.
        tokens: what the summed loss is divided by.
        channels: to the other ranks.
        width: of the hidden states.
        slices: into how many parts the positions of hidden states are split over a tensor group.
        update: called with a step and its loss here, fp32 [], when its gradients are in the parameters.
    """

    def __init__(
        self,
        stage: DecoderStage,
        stage_index: int,
        stage_count: int,
        *,
        double_buffered: bool,
        tokens: int,
        channels: P2PChannels,
        width: int,
        slices: int,
        update: Callable[[int, torch.Tensor], None],
    ) -> None:
        self.stash = WeightStash(stage)
        self._stage, self._stage_index, self._micro_batches_ahead = stage, stage_index, stage_count - 1 - stage_index
        self._double_buffered = double_buffered
        self._tokens, self._channels, self._width, self._slices = tokens, channels, width, slices
        self._update = update
        self._in_flight: list[_InFlightMicroBatch] = []
        self._base = self._updated = -1
        self._loss: dict[int, torch.Tensor] = {}

    def feed(self, step: int, micro_batches: Sequence[Batch]) -> None:
        """Send a step's micro-batches into the pipeline, and take back what comes.

        Args:
            step: its number, one more than that of the last.
            micro_batches: the replica's, which may differ in length.
        """
        if self._base < 0:
            # Weights may have been loaded since this was built.
            self._base = self._updated = step - 1
            self.stash.keep(self._base)
        self._loss[step] = torch.zeros((), device=micro_batches[0].tokens.device)
        for number, part in enumerate(micro_batches, start=1):
            self._forward(step, part, last=number == len(micro_batches))
            if len(self._in_flight) > self._micro_batches_ahead:
                self._backward()
        # What was sent two steps ago has been taken by ranks that are at most one step behind.
        self._channels.flush(keep=4 * len(micro_batches))

    def drain(self) -> None:
        """Let everything in the pipeline come to its end; the next step begins with an empty one."""
        while self._in_flight:
            self._backward()
        self._channels.flush()
        self._base = self._updated = -1

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """See `Executor.evaluate`: with the weights of now, which are all stages' after as many updates once drained.

        Raises:
            RuntimeError: micro-batches are on their way.
        """
        if self._in_flight:
            raise RuntimeError("stages have made different numbers of updates: drain the pipeline first")
        loss = torch.zeros((), device=micro_batches[0].tokens.device)
        for part in micro_batches:
            output: torch.Tensor = self._stage(self._input(part), **self._stage_inputs(part))
            if self._stage.is_last:
                loss = loss + output
            else:
                self._channels.send(output, self._stage_index + 1)
        self._channels.flush()
        return loss

    def _shape(self, part: Batch) -> torch.Size:
        """Of a micro-batch's hidden states."""
        rows, length = part.tokens.shape
        return torch.Size((rows, length // self._slices, self._width))

    def _input(self, part: Batch) -> torch.Tensor:
        """A micro-batch's tokens, or the hidden states that the stage before sends next."""
        if self._stage.is_first:
            return part.tokens
        return self._channels.post_receive(self._stage_index - 1, self._shape(part), self._stage.compute).wait()

    def _stage_inputs(self, part: Batch) -> dict[str, Any]:
        return {"targets": part.targets if self._stage.is_last else None, "token_metadata": part.token_metadata}

    def _version(self, step: int) -> int:
        return max(self._base, step - 2) if self._double_buffered else self._updated

    def _forward(self, step: int, part: Batch, *, last: bool) -> None:
        stage, version = self._stage, self._version(step)
        x = self._input(part)
        if not stage.is_first:
            x.requires_grad_()
        with self.stash.of(version):
            output: torch.Tensor = stage(x, **self._stage_inputs(part))
        output_grad = None
        if stage.is_last:
            output = output / self._tokens
            output_grad = torch.ones_like(output)
            self._loss[step] = self._loss[step] + output.detach()
        else:
            self._channels.send(output.detach(), self._stage_index + 1)
        self._in_flight.append(
            _InFlightMicroBatch(step, version, last, x, get_gradient_edge(output), output_grad, self._shape(part))
        )

    def _backward(self) -> None:
        micro_batch = self._in_flight.pop(0)
        gradient = micro_batch.output_grad
        if gradient is None:
            gradient = self._channels.post_receive(
                self._stage_index + 1, micro_batch.gradient_shape, self._stage.compute
            ).wait()
        with self.stash.of(micro_batch.version):
            torch.autograd.backward((micro_batch.output,), (gradient,))
        if micro_batch.input.grad is not None:
            self._channels.send(micro_batch.input.grad, self._stage_index - 1)
        if micro_batch.last:
            self._finish(micro_batch)

    def _finish(self, micro_batch: _InFlightMicroBatch) -> None:
        self.stash.move_gradients(micro_batch.version)
        self._update(micro_batch.step, self._loss.pop(micro_batch.step))
        self._updated = micro_batch.step
        self.stash.keep(micro_batch.step)
        used = [in_flight.version for in_flight in self._in_flight]
        self.stash.drop_before(min([*used, self._version(micro_batch.step + 1)]))
