"""Weights' gradients computed apart from inputs' gradients: the `W` of zero-bubble schedules (arXiv 2401.10241).

A matrix product whose backward pass runs under a store computes its input's gradient at once, which is what the stage
before waits for, and leaves to the store what its weight's gradient is made of. Nothing is computed twice, and the
gradients are those of a whole backward pass, bit by bit. So do linear layers, the experts of a mixture, fp8's products
of both (`fp8`) and those on a ring (`parallel/tensor/async_tensor_parallel`). Vectors, look-ups and a router's few
rows get their
gradients at once: there is nothing in them to fill a bubble with.
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
    """What is left to do for one micro-batch of one stage."""

    def __init__(self) -> None:
        self._pending: deque[tuple[nn.Parameter, Callable[[], torch.Tensor]]] = deque()

    def __len__(self) -> int:
        """How many gradients are left."""
        return len(self._pending)

    def defer(self, weight: nn.Parameter, compute_grad: Callable[[], torch.Tensor]) -> None:
        """Keep how the gradient of this rank's part of `weight` is made, and what `compute_grad` holds with it."""
        self._pending.append((weight, compute_grad))

    @torch.no_grad()
    def run(self) -> None:
        """Add the gradients to the weights, last layer first; nothing is collective."""
        while self._pending:
            weight, compute_grad = self._pending.popleft()
            _accumulate(weight, compute_grad())


# Not thread-local: autograd runs the backward pass of a device in a thread of its own.
_store: WeightGradStore | None = None


@contextmanager
def deferring_weight_grads(store: WeightGradStore | None) -> Iterator[None]:
    """Products that run in the block leave their weights' gradients to `store`; without one nothing changes."""
    global _store
    before, _store = _store, store
    try:
        yield
    finally:
        _store = before


def current_store() -> WeightGradStore | None:
    """The store of the block that runs."""
    return _store


def set_current_store(store: WeightGradStore | None) -> None:
    """Go on in a block that was interrupted: passes that take turns each have their own store."""
    global _store
    _store = store


@dataclass(frozen=True, slots=True)
class DeferredWeightGrad:
    """A product's weight, and who computes its gradient. Autograd does not see the parameter in it."""

    weight: nn.Parameter
    store: WeightGradStore

    def defer(self, compute_grad: Callable[[], torch.Tensor]) -> None:
        """See `WeightGradStore.defer`."""
        self.store.defer(self.weight, compute_grad)


def defer_weight_grad_of(x: torch.Tensor, weight: torch.Tensor) -> DeferredWeightGrad | None:
    """What a product of `x` and `weight` leaves its weight's gradient to; None where the backward pass computes it."""
    if _store is None or not (x.requires_grad and weight.requires_grad and isinstance(weight, nn.Parameter)):
        return None
    return DeferredWeightGrad(weight, _store)


def local_operand(x: torch.Tensor, weight: torch.Tensor, deferred: DeferredWeightGrad | None) -> torch.Tensor:
    """This rank's part of `weight` in the format of `x`; apart from the graph where its gradient is left to later."""
    return _local(weight if deferred is None else weight.detach()).to(x.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """X [..., inputs] times the rows of weight [outputs, inputs], in the format of x -> [..., outputs]."""
    deferred = defer_weight_grad_of(x, weight)
    if deferred is None:
        return F.linear(x, local_operand(x, weight, deferred))
    product: torch.Tensor = _Linear.apply(x, local_operand(x, weight, deferred), deferred)  # type: ignore[no-untyped-call]
    return product


def weight_grad(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of a matrix [outputs, inputs] that x [..., inputs] was multiplied with; gradient [..., outputs]."""
    return gradient.flatten(0, -2).t() @ x.flatten(0, -2)


def grouped(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
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
        # Attached to the graph, x would keep what the stage received until then.
        ctx.deferred.defer(partial(weight_grad, x.detach(), gradient))
        return gradient @ cast, None, None


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, cast: torch.Tensor, counts: torch.Tensor, deferred: DeferredWeightGrad
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, cast, counts)
        ctx.deferred = deferred
        return grouped_linear(rows, cast, counts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        rows, cast, counts = ctx.saved_tensors
        (gradient,) = gradients
        ctx.deferred.defer(partial(grouped_weight_grad, gradient, rows.detach(), counts))
        return grouped_input_grad(gradient, cast, counts), None, None, None


def _local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _accumulate(weight: nn.Parameter, gradient: torch.Tensor) -> None:
    gradient = gradient.to(weight.dtype)
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
