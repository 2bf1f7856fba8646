"""The passes of one stage over micro-batches: the saved forward state, and backward passes in one or two halves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from meshwright_worker.data.batch import Batch
from meshwright_worker.models.split_backward import WeightGradStore, deferring_weight_grads
from meshwright_worker.parallel.data.fsdp import UnitReduction
from meshwright_worker.parallel.parallelize import LocalStage


@dataclass(frozen=True, slots=True)
class _SavedForward:
    """What a forward pass saves for the backward pass: the graph, but not the output, which only other stages need."""

    input: torch.Tensor
    output: GradientEdge
    output_grad: torch.Tensor | None
    """The gradient that the backward pass starts with; None if it is received."""
    store: WeightGradStore | None


class PipelineStage:
    """Runs one stage.

    Args:
        stage: the stage.
        tokens: the divisor of the summed loss, `tokens_of_step`.
        rematerialize: whether to save only the input and recompute the stage for the backward pass.
    """

    def __init__(self, stage: LocalStage, tokens: int, *, rematerialize: bool) -> None:
        self.stage = stage
        self._tokens = tokens
        self._rematerialize = rematerialize
        self._saved: dict[int, _SavedForward] = {}
        self._stores: dict[int, WeightGradStore] = {}

    def forward(self, micro_batch: int, batch: Batch, received: torch.Tensor | None, *, split: bool) -> torch.Tensor:
        """Run one forward pass.

        Args:
            micro_batch: its index.
            batch: its tokens, targets and token metadata.
            received: hidden states of the previous stage; None for the first stage.
            split: whether its backward pass will be split into two halves.

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
        """Return hidden states, or the loss summed over targets; saves nothing."""
        module = self.stage.module
        x = batch.tokens if received is None else received
        output: torch.Tensor = module(
            x, targets=batch.targets if module.is_last else None, token_metadata=batch.token_metadata
        )
        return output

    def backward(self, micro_batch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Run the backward pass, or its first half, which defers weight gradients to `weight`.

        Args:
            micro_batch: its index.
            gradient: of the hidden states; None for the last stage.

        Returns:
            The gradient of the received hidden states; None for the first stage.
        """
        saved = self._saved.pop(micro_batch)
        with deferring_weight_grads(saved.store):
            torch.autograd.backward((saved.output,), (saved.output_grad if gradient is None else gradient,))
        if saved.store is not None:
            self._stores[micro_batch] = saved.store
        received: torch.Tensor | None = saved.input.grad
        return received

    def weight(self, micro_batch: int, *, reduce: bool = False, last: bool = False) -> None:
        """Run the second half of the backward pass: the weight gradients.

        Args:
            micro_batch: its index.
            reduce: whether FSDP reduces each of its units as soon as it has its gradients.
            last: whether this is the last half of a step.
        """
        store = self._stores.pop(micro_batch)
        if not reduce:
            store.run()
            return
        reduction = UnitReduction(self.stage.module, store.weights, last=last)
        store.run(reduction.added)
        reduction.finish()

    def discard(self) -> None:
        """Drop the state of passes that did not finish."""
        self._saved.clear()
        self._stores.clear()
