"""One stage's passes over micro-batches: what it keeps of a forward pass, and how its backward pass comes in halves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from meshwright_worker.data.batch import Batch
from meshwright_worker.models.deferred import WeightStore, deferring
from meshwright_worker.parallel.apply import BuiltStage


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a forward pass leaves for the backward pass: the graph, but not the output, which only others need."""

    input: torch.Tensor
    output: GradientEdge
    seed: torch.Tensor | None
    """What the backward pass begins with; None where it is received."""
    store: WeightStore | None


class Chunk:
    """Runs one stage.

    Args:
        stage: the stage.
        tokens: what the summed loss is divided by, `tokens_of_step`.
        rematerialize: whether to keep only the input and compute the stage again for the backward pass.
    """

    def __init__(self, stage: BuiltStage, tokens: int, *, rematerialize: bool) -> None:
        self.stage = stage
        self._tokens = tokens
        self._rematerialize = rematerialize
        self._kept: dict[int, _Kept] = {}
        self._stores: dict[int, WeightStore] = {}

    def forward(self, micro_batch: int, part: Batch, received: torch.Tensor | None, *, split: bool) -> torch.Tensor:
        """One forward pass.

        Args:
            micro_batch: its number.
            part: its tokens, targets and places.
            received: hidden states of the stage before; None for the first stage.
            split: whether its backward pass will come in halves.

        Returns:
            Hidden states for the next stage, or the summed loss over `tokens`, fp32 []; both detached.
        """
        x = part.tokens if received is None else received.requires_grad_()
        store = WeightStore() if split else None
        module = self.stage.module
        run = partial(checkpoint, module, use_reentrant=False) if self._rematerialize else module
        with deferring(store):
            output = run(x, targets=part.targets if module.is_last else None, places=part.places)
        seed = None
        if module.is_last:
            output = output / self._tokens
            seed = torch.ones_like(output)
        self._kept[micro_batch] = _Kept(x, get_gradient_edge(output), seed, store)
        passed: torch.Tensor = output.detach()
        return passed

    @torch.no_grad()
    def evaluate(self, part: Batch, received: torch.Tensor | None) -> torch.Tensor:
        """Hidden states, or the loss summed over targets, with nothing kept."""
        module = self.stage.module
        x = part.tokens if received is None else received
        output: torch.Tensor = module(x, targets=part.targets if module.is_last else None, places=part.places)
        return output

    def backward(self, micro_batch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The backward pass, or its first half, which leaves weights' gradients to `weight`.

        Args:
            micro_batch: its number.
            gradient: of the hidden states; None for the last stage.

        Returns:
            The gradient of what was received; None for the first stage.
        """
        kept = self._kept.pop(micro_batch)
        with deferring(kept.store):
            torch.autograd.backward((kept.output,), (kept.seed if gradient is None else gradient,))
        if kept.store is not None:
            self._stores[micro_batch] = kept.store
        received: torch.Tensor | None = kept.input.grad
        return received

    def weight(self, micro_batch: int) -> None:
        """The second half of the backward pass."""
        self._stores.pop(micro_batch).run()

    def forget(self) -> None:
        """Drop what passes left that did not come to their end."""
        self._kept.clear()
        self._stores.clear()
