"""Pipelines that are not flushed between steps: PipeDream and PipeDream-2BW.

Stage s of P runs 1F1B over an endless sequence of micro-batches: once it has sent P - 1 - s of them on, it alternates
one forward pass and one backward pass. After the last backward pass of a step the stage updates its own weights,
without waiting for other stages. With updates counted since the pipeline was last empty, the gradient of step t is
taken

- by PipeDream (arXiv 1806.03377, section 3.3, weight stashing) at version t - P + s of the weights of stage s;
- by PipeDream-2BW (arXiv 2006.09503, section 3.1) at version t - 2 in every stage;

at version 0 if that is negative, and is applied to version t - 1. Forward and backward pass use the same version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright_worker.data.batch import Batch
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.parallel.pipeline.p2p import P2PChannels, PendingReceive


class WeightStash:
    """Copies of a stage's weights by version: the number of updates that they contain.

    Weights change while micro-batches are in flight, and a micro-batch's backward pass must use the weights of its
    forward pass (PipeDream, arXiv 1806.03377, section 3.3).
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._versions: dict[int, dict[str, nn.Parameter]] = {}

    @property
    def versions(self) -> list[int]:
        """The stored versions, oldest first."""
        return sorted(self._versions)

    def keep(self, version: int) -> None:
        """Copy the current weights, except frozen ones, which have only one version."""
        self._versions[version] = {
            name: nn.Parameter(parameter.detach().clone())
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad
        }

    def drop_before(self, version: int) -> None:
        """Delete older versions."""
        for old in [known for known in self._versions if known < version]:
            del self._versions[old]

    @contextmanager
    def of(self, version: int) -> Iterator[None]:
        """Use the weights of a version inside the block.

        Run backward passes inside such a block too: activation checkpointing recomputes forward passes there.
        """
        weights, now = self._versions[version], dict(self._module.named_parameters())
        self._set(weights)
        try:
            yield
        finally:
            self._set({name: now[name] for name in weights})

    def _set(self, weights: dict[str, nn.Parameter]) -> None:
        for name, weight in weights.items():
            owner, _, own = name.rpartition(".")
            setattr(self._module.get_submodule(owner), own, weight)

    def move_gradients(self, version: int) -> None:
        """Move a version's accumulated gradients to the weights that the optimizer updates."""
        trained = dict(self._module.named_parameters())
        for name, weight in self._versions[version].items():
            trained[name].grad, weight.grad = weight.grad, None


@dataclass(slots=True)
class _InFlightMicroBatch:
    """A micro-batch between its forward and its backward pass."""

    step: int
    version: int
    last: bool
    """Whether it is the last micro-batch of its step."""
    input: torch.Tensor
    output: GradientEdge
    output_grad: torch.Tensor | None
    gradient_shape: torch.Size


class PipeDreamPipeline:
    """One stage of a pipeline without flushes.

    Args:
        stage: the stage's module.
        stage_index: this rank's index in the pipeline.
        stage_count: number of stages.
        double_buffered: PipeDream-2BW.
        tokens: the divisor of the summed loss.
        channels: to the other ranks.
        width: of the hidden states.
        slices: number of parts that the positions of hidden states are split into over a tensor group.
        update: called with a step and its loss on this rank, fp32 [], once its gradients are in the parameters.
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
        self._next_gradient: PendingReceive | None = None
        self._base = self._updated = -1
        self._loss: dict[int, torch.Tensor] = {}

    def feed(self, step: int, micro_batches: Sequence[Batch]) -> None:
        """Feed a step's micro-batches into the pipeline, and run the passes that become ready.

        Args:
            step: the step's number, one more than the previous one.
            micro_batches: the replica's, which may differ in length.
        """
        if self._base < 0:
            # Weights may have been loaded since this object was built.
            self._base = self._updated = step - 1
            self.stash.keep(self._base)
        self._loss[step] = torch.zeros((), device=micro_batches[0].tokens.device)
        for number, part in enumerate(micro_batches, start=1):
            self._forward(step, part, last=number == len(micro_batches))
            if len(self._in_flight) > self._micro_batches_ahead:
                self._backward()
        # Ranks are at most one step behind, so they have received the tensors that were sent two steps ago.
        self._channels.flush(keep=4 * len(micro_batches))

    def drain(self) -> None:
        """Finish all micro-batches in the pipeline; the next step starts with an empty one."""
        while self._in_flight:
            self._backward()
        self._channels.flush()
        self._base = self._updated = -1

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """See `Executor.evaluate`. Uses the current weights: after `drain`, all stages have made the same number of
        updates.

        Raises:
            RuntimeError: there are micro-batches in the pipeline.
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
        """Shape of a micro-batch's hidden states."""
        rows, length = part.tokens.shape
        return torch.Size((rows, length // self._slices, self._width))

    def _input(self, part: Batch) -> torch.Tensor:
        """Return a micro-batch's tokens, or the hidden states that the previous stage sends next."""
        if self._stage.is_first:
            return part.tokens
        return self._channels.post_receive(self._stage_index - 1, self._shape(part), self._stage.compute).wait()

    def _post_gradient(self) -> PendingReceive:
        """Start to receive the gradient of the oldest micro-batch in flight."""
        shape = self._in_flight[0].gradient_shape
        return self._channels.post_receive(self._stage_index + 1, shape, self._stage.compute)

    def _stage_inputs(self, part: Batch) -> dict[str, Any]:
        return {"targets": part.targets if self._stage.is_last else None, "token_metadata": part.token_metadata}

    def _version(self, step: int) -> int:
        return max(self._base, step - 2) if self._double_buffered else self._updated

    def _forward(self, step: int, part: Batch, *, last: bool) -> None:
        stage, version = self._stage, self._version(step)
        x = self._input(part)
        if not stage.is_first:
            x.requires_grad_()
        if not stage.is_last and len(self._in_flight) == self._micro_batches_ahead:
            # A backward pass follows. The next stage sends its gradient before it receives the output of this pass: a
            # rank that waits for its device after this send would otherwise block both (see `rank_program`).
            self._next_gradient = self._post_gradient()
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
        gradient = self._in_flight[0].output_grad
        if gradient is None:
            gradient = (self._next_gradient or self._post_gradient()).wait()
            self._next_gradient = None
        micro_batch = self._in_flight.pop(0)
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
