"""Computes weight gradients separately from input gradients: the `W` of zero-bubble schedules (arXiv 2401.10241).

A matrix product whose backward pass runs under a store computes its input gradient at once, because the previous stage
waits for it, and defers its weight gradient to the store. Nothing is computed twice, and the gradients are those of a
full backward pass, bit by bit. This applies to linear layers, the experts of a mixture, fp8's products of both (`fp8`)
and ring products (`parallel/tensor/async_tensor_parallel`). Vectors, look-ups and a router's few rows get their
gradients at once: they are too small to fill a bubble.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshwright_worker.models.grouped_mm import grouped_input_grad, grouped_linear, grouped_weight_grad


class WeightGradStore:
    """The deferred weight gradients of one micro-batch of one stage."""

    def __init__(self) -> None:
        self._pending: deque[tuple[nn.Parameter, Callable[[], torch.Tensor]]] = deque()

    def __len__(self) -> int:
        """Number of deferred gradients."""
        return len(self._pending)

    def defer(self, weight: nn.Parameter, compute_grad: Callable[[], torch.Tensor]) -> None:
        """Store the function that computes the gradient of this rank's part of `weight`, and its operands."""
        self._pending.append((weight, compute_grad))

    @property
    def weights(self) -> list[nn.Parameter]:
        """The weights of the deferred gradients, one for each gradient."""
        return [weight for weight, _ in self._pending]

    @torch.no_grad()
    def run(self, added: Callable[[nn.Parameter], None] | None = None) -> None:
        """Add the gradients to the weights, last layer first, and call `added` after each; has no collective itself."""
        while self._pending:
            weight, compute_grad = self._pending.popleft()
            _accumulate(weight, compute_grad())
            if added is not None:
                added(weight)


# Not thread-local: autograd runs the backward pass of a device in a separate thread.
_store: WeightGradStore | None = None


@contextmanager
def deferring_weight_grads(store: WeightGradStore | None) -> Iterator[None]:
    """Make products in the block defer their weight gradients to `store`; without a store nothing changes."""
    global _store
    before, _store = _store, store
    try:
        yield
    finally:
        _store = before


def current_store() -> WeightGradStore | None:
    """Return the store of the current block."""
    return _store


def set_current_store(store: WeightGradStore | None) -> None:
    """Switch to the store of a block that was interrupted: overlapped passes each have their own store."""
    global _store
    _store = store


@dataclass(frozen=True, slots=True)
class DeferredWeightGrad:
    """A product's weight, and the store for its gradient. Hides the parameter from autograd."""

    weight: nn.Parameter
    store: WeightGradStore

    def defer(self, compute_grad: Callable[[], torch.Tensor]) -> None:
        """See `WeightGradStore.defer`."""
        self.store.defer(self.weight, compute_grad)


def defer_weight_grad_of(x: torch.Tensor, weight: torch.Tensor) -> DeferredWeightGrad | None:
    """Return where the product of `x` and `weight` defers its weight gradient; None if the backward pass
    computes it.
    """
    if _store is None or not (x.requires_grad and weight.requires_grad and isinstance(weight, nn.Parameter)):
        return None
    return DeferredWeightGrad(weight, _store)


def local_operand(x: torch.Tensor, weight: torch.Tensor, deferred: DeferredWeightGrad | None) -> torch.Tensor:
    """Return this rank's part of `weight` in the format of `x`; detached if its gradient is deferred."""
    return _local(weight if deferred is None else weight.detach()).to(x.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply x [..., inputs] with the rows of weight [outputs, inputs], in the format of x -> [..., outputs]."""
    deferred = defer_weight_grad_of(x, weight)
    if deferred is None:
        return F.linear(x, local_operand(x, weight, deferred))
    product: torch.Tensor = _Linear.apply(x, local_operand(x, weight, deferred), deferred)  # type: ignore[no-untyped-call]
    return product


def weight_grad(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a matrix [outputs, inputs] that x [..., inputs] was multiplied with; gradient [...,
    outputs].
    """
    return gradient.flatten(0, -2).t() @ x.flatten(0, -2)


def grouped(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor | int) -> torch.Tensor:
    """`grouped_linear` with this rank's part of a parameter, [groups, outputs, inputs], in the format of the rows."""
    deferred = defer_weight_grad_of(rows, weight)
    if deferred is None:
        return grouped_linear(rows, local_operand(rows, weight, deferred), counts)
    product: torch.Tensor = _Grouped.apply(  # type: ignore[no-untyped-call]
        rows, local_operand(rows, weight, deferred), counts, deferred
    )
    return product


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cast: torch.Tensor, deferred: DeferredWeightGrad) -> torch.Tensor:
        ctx.save_for_backward(x, cast)
        ctx.deferred = deferred
        return F.linear(x, cast)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, cast = ctx.saved_tensors
        (gradient,) = gradients
        # Attached to the graph, x would keep the stage's input alive until then.
        ctx.deferred.defer(partial(weight_grad, x.detach(), gradient))
        return gradient @ cast, None, None


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, cast: torch.Tensor, counts: torch.Tensor | int, deferred: DeferredWeightGrad
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, cast)
        ctx.counts = counts
        ctx.deferred = deferred
        return grouped_linear(rows, cast, counts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        rows, cast = ctx.saved_tensors
        counts: torch.Tensor | int = ctx.counts
        (gradient,) = gradients
        ctx.deferred.defer(partial(grouped_weight_grad, gradient, rows.detach(), counts))
        return grouped_input_grad(gradient, cast, counts), None, None, None


def _local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _accumulate(weight: nn.Parameter, gradient: torch.Tensor) -> None:
    gradient = gradient.to(weight.grad_dtype or weight.dtype)
    if isinstance(weight, DTensor):
        gradient = DTensor.from_local(
            gradient,
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )
    if weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad += gradient
