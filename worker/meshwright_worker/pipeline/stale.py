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
from meshwright_worker.models.llama import DecoderStage
from meshwright_worker.pipeline.channels import Channels
from meshwright_worker.pipeline.stash import Stash


@dataclass(slots=True)
class _Passing:
    """A micro-batch between its forward and its backward pass."""

    step: int
    version: int
    last: bool
    """Whether it is the last of its step."""
    input: torch.Tensor
    output: GradientEdge
    seed: torch.Tensor | None
    gradient_shape: torch.Size


class StalePipeline:
    """One stage in a pipeline that is not drained.

    Args:
        stage: the stage's module.
        place: this rank among the pipeline's.
        places: how many there are.
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
        place: int,
        places: int,
        *,
        double_buffered: bool,
        tokens: int,
        channels: Channels,
        width: int,
        slices: int,
        update: Callable[[int, torch.Tensor], None],
    ) -> None:
        self.stash = Stash(stage)
        self._stage, self._place, self._behind = stage, place, places - 1 - place
        self._double_buffered = double_buffered
        self._tokens, self._channels, self._width, self._slices = tokens, channels, width, slices
        self._update = update
        self._passing: list[_Passing] = []
        self._base = self._updated = -1
        self._loss: dict[int, torch.Tensor] = {}

    def feed(self, step: int, parts: Sequence[Batch]) -> None:
        """Send a step's micro-batches into the pipeline, and take back what comes.

        Args:
            step: its number, one more than that of the last.
            parts: the replica's, which may differ in length.
        """
        if self._base < 0:
            # Weights may have been loaded since this was built.
            self._base = self._updated = step - 1
            self.stash.keep(self._base)
        self._loss[step] = torch.zeros((), device=parts[0].tokens.device)
        for number, part in enumerate(parts, start=1):
            self._forward(step, part, last=number == len(parts))
            if len(self._passing) > self._behind:
                self._backward()
        # What was sent two steps ago has been taken by ranks that are at most one step behind.
        self._channels.flush(keep=4 * len(parts))

    def drain(self) -> None:
        """Let everything in the pipeline come to its end; the next step begins with an empty one."""
        while self._passing:
            self._backward()
        self._channels.flush()
        self._base = self._updated = -1

    @torch.no_grad()
    def evaluate(self, parts: Sequence[Batch]) -> torch.Tensor:
        """See `Executor.evaluate`: with the weights of now, which are all stages' after as many updates once drained.

        Raises:
            RuntimeError: micro-batches are on their way.
        """
        if self._passing:
            raise RuntimeError("stages have made different numbers of updates: drain the pipeline first")
        loss = torch.zeros((), device=parts[0].tokens.device)
        for part in parts:
            output: torch.Tensor = self._stage(self._input(part), **self._about(part))
            if self._stage.is_last:
                loss = loss + output
            else:
                self._channels.send(output, self._place + 1)
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
        return self._channels.post(self._place - 1, self._shape(part), self._stage.compute).wait()

    def _about(self, part: Batch) -> dict[str, Any]:
        return {"targets": part.targets if self._stage.is_last else None, "places": part.places}

    def _version(self, step: int) -> int:
        return max(self._base, step - 2) if self._double_buffered else self._updated

    def _forward(self, step: int, part: Batch, *, last: bool) -> None:
        stage, version = self._stage, self._version(step)
        x = self._input(part)
        if not stage.is_first:
            x.requires_grad_()
        with self.stash.of(version):
            output: torch.Tensor = stage(x, **self._about(part))
        seed = None
        if stage.is_last:
            output = output / self._tokens
            seed = torch.ones_like(output)
            self._loss[step] = self._loss[step] + output.detach()
        else:
            self._channels.send(output.detach(), self._place + 1)
        self._passing.append(_Passing(step, version, last, x, get_gradient_edge(output), seed, self._shape(part)))

    def _backward(self) -> None:
        one = self._passing.pop(0)
        gradient = one.seed
        if gradient is None:
            gradient = self._channels.post(self._place + 1, one.gradient_shape, self._stage.compute).wait()
        with self.stash.of(one.version):
            torch.autograd.backward((one.output,), (gradient,))
        if one.input.grad is not None:
            self._channels.send(one.input.grad, self._place - 1)
        if one.last:
            self._finish(one)

    def _finish(self, one: _Passing) -> None:
        self.stash.hand_over_gradients(one.version)
        self._update(one.step, self._loss.pop(one.step))
        self._updated = one.step
        self.stash.keep(one.step)
        used = [passing.version for passing in self._passing]
        self.stash.forget_before(min([*used, self._version(one.step + 1)]))
