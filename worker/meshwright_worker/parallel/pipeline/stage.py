"""One stage's passes over micro-batches: what it keeps of a forward pass, and how its backward pass comes in halves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from meshwright_worker.data.batch import Batch
from meshwright_worker.models.split_backward import WeightGradStore, deferring_weight_grads
from meshwright_worker.parallel.parallelize import LocalStage


@dataclass(frozen=True, slots=True)
class _SavedForward:
    """What a forward pass leaves for the backward pass: the graph, but not the output, which only others need."""

    input: torch.Tensor
    output: GradientEdge
    output_grad: torch.Tensor | None
    """What the backward pass begins with; None where it is received."""
    store: WeightGradStore | None


class PipelineStage:
    """Runs one stage.

    Args:
        stage: the stage.
        tokens: what the summed loss is divided by, `tokens_of_step`.
        rematerialize: whether to keep only the input and compute the stage again for the backward pass.
    """

    def __init__(self, stage: LocalStage, tokens: int, *, rematerialize: bool) -> None:
        self.stage = stage
        self._tokens = tokens
        self._rematerialize = rematerialize
        self._saved: dict[int, _SavedForward] = {}
        self._stores: dict[int, WeightGradStore] = {}

    def forward(self, micro_batch: int, batch: Batch, received: torch.Tensor | None, *, split: bool) -> torch.Tensor:
        """One forward pass.

        Args:
            micro_batch: its number.
            batch: its tokens, targets and places.
            received: hidden states of the stage before; None for the first stage.
            split: whether its backward pass will come in halves.

        Returns:
            Hidden states for the next stage, or the summed loss over `tokens`, fp32 []; both detached.
        """
        x = batch.tokens if received is None else received.requires_grad_()
        store = WeightGradStore() if split else None
        module = self.stage.module
        run = partial(checkpoint, module, use_reentrant=False) if self._rematerialize else module
        with deferring_weight_grads(store):
            output = run(x, targets=batch.targets if module.is_last else None, token_metadata=batch.token_metadata)
        output_grad = None
        if module.is_last:
            output = output / self._tokens
            output_grad = torch.ones_like(output)
        self._saved[micro_batch] = _SavedForward(x, get_gradient_edge(output), output_grad, store)
        detached_output: torch.Tensor = output.detach()
        return detached_output

    @torch.no_grad()
    def evaluate(self, batch: Batch, received: torch.Tensor | None) -> torch.Tensor:
        """Hidden states, or the loss summed over targets, with nothing kept."""
        module = self.stage.module
        x = batch.tokens if received is None else received
        output: torch.Tensor = module(
            x, targets=batch.targets if module.is_last else None, token_metadata=batch.token_metadata
        )
        return output

    def backward(self, micro_batch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The backward pass, or its first half, which leaves weights' gradients to `weight`.

        Args:
            micro_batch: its number.
            gradient: of the hidden states; None for the last stage.

        Returns:
            The gradient of what was received; None for the first stage.
        """
        saved = self._saved.pop(micro_batch)
        with deferring_weight_grads(saved.store):
            torch.autograd.backward((saved.output,), (saved.output_grad if gradient is None else gradient,))
        if saved.store is not None:
            self._stores[micro_batch] = saved.store
        received: torch.Tensor | None = saved.input.grad
        return received

    def weight(self, micro_batch: int) -> None:
        """The second half of the backward pass."""
        self._stores.pop(micro_batch).run()

    def discard(self) -> None:
        """Drop what passes left that did not come to their end."""
        self._saved.clear()
        self._stores.clear()
