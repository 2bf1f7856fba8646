"""Weights' gradients computed apart from inputs' gradients: the `W` of zero-bubble schedules (arXiv 2401.10241).

A matrix product whose backward pass runs under a store computes its input's gradient at once, which is what the stage
before waits for, and leaves its input and its output's gradient in the store. Nothing is computed twice. Parameters of
other layers, vectors and look-ups, get their gradients at once: there is nothing in them to fill a bubble with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F


class WeightStore:
    """What is left to do for one micro-batch of one stage."""

    def __init__(self) -> None:
        self._left: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]] = []

    def leave(self, weight: nn.Parameter, x: torch.Tensor, gradient: torch.Tensor) -> None:
        """Keep what the gradient of `weight` [outputs, inputs] is made of: x [..., inputs], gradient [..., outputs]."""
        self._left.append((weight, x, gradient))

    def run(self) -> None:
        """Add the gradients to the weights, last layer first."""
        for weight, x, gradient in self._left:
            _accumulate(weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2))
        self._left.clear()


# Not thread-local: autograd runs the backward pass of a device in a thread of its own.
_store: WeightStore | None = None


@contextmanager
def deferring(store: WeightStore | None) -> Iterator[None]:
    """Products that run in the block leave their weights' gradients to `store`; without one nothing changes."""
    global _store
    before, _store = _store, store
    try:
        yield
    finally:
        _store = before


def current() -> WeightStore | None:
    """The store of the block that runs."""
    return _store


def go_on_with(store: WeightStore | None) -> None:
    """Go on in a block that was interrupted: passes that take turns each have their own store."""
    global _store
    _store = store


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """X [..., inputs] times the rows of weight [outputs, inputs], in the format of x -> [..., outputs]."""
    if _store is None or not (x.requires_grad and weight.requires_grad and isinstance(weight, nn.Parameter)):
        return F.linear(x, _local(weight).to(x.dtype))
    cast = _local(weight.detach()).to(x.dtype)
    # In a tuple, since a parameter among the arguments would become a part of the graph.
    product: torch.Tensor = _Deferred.apply(x, cast, (weight,), _store)  # type: ignore[no-untyped-call]
    return product


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cast: torch.Tensor, weight: tuple[nn.Parameter], store: WeightStore
    ) -> torch.Tensor:
        ctx.save_for_backward(x, cast)
        ctx.weight, ctx.store = weight, store
        return F.linear(x, cast)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        x, cast = ctx.saved_tensors
        (gradient,) = gradients
        ctx.store.leave(*ctx.weight, x, gradient)
        return gradient @ cast, None, None, None


def _local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


@torch.no_grad()
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
