"""Tensor parallelism whose collectives overlap the neighboring products (Wang et al., ASPLOS 2023, 3567955.3567959).

Sequence parallelism gathers positions before the first products of a sub-layer, and reduce-scatters them after the last
one. Here both collectives are decomposed into a ring of sends between neighbors. All-gather: a rank multiplies the
positions that it has while it sends them to the next rank and receives others from the previous rank. Reduce-scatter:
it multiplies the positions of one rank while the partial sum of the previous ranks is being received. Each is the
backward pass of the other. A rank sends the same bytes as in a ring all-gather and reduce-scatter, (n - 1)/n of the
total, in n - 1 messages. Of n partial products, all but the last hide one message.

A gathered input is saved for the weight gradients, as with collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from meshwright_worker.distributed.collectives import RingTransfer
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.layers import Linear, local
from meshwright_worker.models.split_backward import DeferredWeightGrad, defer_weight_grad_of, local_operand, weight_grad

_POSITIONS = 1


@dataclass(frozen=True, slots=True)
class Ring:
    """The ranks of a tensor group, each with its own positions."""

    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        """This rank's index."""
        return self.group.rank()

    @property
    def ranks(self) -> int:
        """Size of the group."""
        return self.group.size()

    def pass_on(self, tensor: torch.Tensor) -> RingTransfer:
        """Send a tensor to the next rank, and receive one of the same shape from the previous rank."""
        return RingTransfer([tensor], [torch.empty_like(tensor)], self.group)

    def each(self, own: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield every rank and its tensor, this rank first; the next one arrives while the caller works on one.
        Collective.
        """
        part = own.contiguous()
        for turn in range(self.ranks):
            transfer = self.pass_on(part) if turn < self.ranks - 1 else None
            yield (self.rank - turn) % self.ranks, part
            if transfer is not None:
                (part,) = transfer.wait()

    def ring_reduce(self, share: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Return the sum over ranks of `share(this rank)`; a sum is sent while the next share is computed.
        Collective.
        """
        total, incoming_sum = share((self.rank - 1) % self.ranks), None
        for turn in range(1, self.ranks):
            incoming_sum = self.pass_on(total.contiguous())
            added = share((self.rank - 1 - turn) % self.ranks)
            # Not in place: selective checkpointing may have saved the product.
            (received_sum,) = incoming_sum.wait()
            total = received_sum.add_(added)
        return total


class _GatheredProducts(torch.autograd.Function):
    """The products of every rank's positions with several matrices: all-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, ring: Ring, deferred: list[DeferredWeightGrad] | None, *matrices: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        parts: list[torch.Tensor] = [x] * ring.ranks
        products: list[list[torch.Tensor]] = [[x] * ring.ranks for _ in matrices]
        for rank, part in ring.each(x):
            parts[rank] = part
            for product, matrix in zip(products, matrices, strict=True):
                product[rank] = F.linear(part, matrix)
        ctx.save_for_backward(torch.cat(parts, dim=_POSITIONS), *matrices)
        ctx.ring, ctx.deferred = ring, deferred
        return tuple(torch.cat(product, dim=_POSITIONS) for product in products)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ring: Ring = ctx.ring
        x, *matrices = ctx.saved_tensors
        parts = [gradient.chunk(ring.ranks, dim=_POSITIONS) for gradient in gradients]

        def share(rank: int) -> torch.Tensor:
            total: torch.Tensor = parts[0][rank] @ matrices[0]
            for part, matrix in zip(parts[1:], matrices[1:], strict=True):
                total = total + part[rank] @ matrix
            return total

        return ring.ring_reduce(share), None, None, *_weight_grads(ctx.deferred, x, gradients)


class _ScatteredProduct(torch.autograd.Function):
    """The product of all positions with a matrix, summed over ranks: reduce-scatter forward, all-gather backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, ring: Ring, deferred: list[DeferredWeightGrad] | None, matrix: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, matrix)
        ctx.ring, ctx.deferred = ring, deferred
        parts = x.chunk(ring.ranks, dim=_POSITIONS)
        return ring.ring_reduce(lambda rank: F.linear(parts[rank], matrix))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ring: Ring = ctx.ring
        x, matrix = ctx.saved_tensors
        parts: list[torch.Tensor] = [x] * ring.ranks
        input_grads: list[torch.Tensor] = [x] * ring.ranks
        for rank, part in ring.each(gradients[0]):
            parts[rank], input_grads[rank] = part, part @ matrix
        gradient = torch.cat(parts, dim=_POSITIONS)
        return torch.cat(input_grads, dim=_POSITIONS), None, None, *_weight_grads(ctx.deferred, x, [gradient])


def _deferred_weight_grads(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[DeferredWeightGrad] | None:
    """Return the deferred weight gradients of all products; None if the backward pass computes them."""
    found = [deferred for weight in weights if (deferred := defer_weight_grad_of(x, weight)) is not None]
    return found if len(found) == len(weights) else None


def _matrices(
    x: torch.Tensor, weights: Sequence[torch.Tensor], deferred: list[DeferredWeightGrad] | None
) -> list[torch.Tensor]:
    each = deferred if deferred is not None else [None] * len(weights)
    return [local_operand(x, weight, one) for weight, one in zip(weights, each, strict=True)]


def _weight_grads(
    deferred: list[DeferredWeightGrad] | None, x: torch.Tensor, gradients: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    if deferred is None:
        return [weight_grad(x, gradient) for gradient in gradients]
    for one, gradient in zip(deferred, gradients, strict=True):
        one.defer(partial(weight_grad, x.detach(), gradient))
    return [None] * len(gradients)


class _RingMatmul:
    """A ring product, run eagerly or excluded from compiled code."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ring = Ring(group)
        self._products = _gathered_products
        self._product = _scattered_product

    def compile(self) -> None:
        """Prepare for torch.compile: a graph cannot contain sends that overlap products."""
        self._products, self._product = _outside_graph()


class AllGatherMatmul(_RingMatmul):
    """The first products of a sub-layer, see `models.layers.Products`."""

    def __call__(self, x: torch.Tensor, linears: Sequence[Linear]) -> list[torch.Tensor]:
        """[batch, own positions, inputs] -> [batch, positions, outputs] of each layer, with its bias. Collective."""
        found = self._products(x, [linear.weight for linear in linears], self._ring)
        biases = [linear.bias for linear in linears]
        return [y if b is None else y + local(b).to(y.dtype) for y, b in zip(found, biases, strict=True)]

    def one(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The same for a single layer, as its `Linear.product`: without its bias."""
        (product,) = self._products(x, [weight], self._ring)
        return product


class MatmulReduceScatter(_RingMatmul):
    """The last product of a sub-layer, as its `Linear.product`."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[batch, positions, own inputs] -> [batch, own positions, outputs], summed over the group. Collective."""
        return self._product(x, weight, self._ring)


def ring_matmuls(stage: DecoderStage) -> list[_RingMatmul]:
    """Return the ring products of a stage's layers."""
    found = [getattr(module, name, None) for module in stage.layers.modules() for name in ("products", "product")]
    return [ring for ring in found if isinstance(ring, _RingMatmul)]


def _gathered_products(x: torch.Tensor, weights: Sequence[torch.Tensor], ring: Ring) -> Sequence[torch.Tensor]:
    deferred = _deferred_weight_grads(x, weights)
    products: tuple[torch.Tensor, ...] = _GatheredProducts.apply(  # type: ignore[no-untyped-call]
        x, ring, deferred, *_matrices(x, weights, deferred)
    )
    return products


def _scattered_product(x: torch.Tensor, weight: torch.Tensor, ring: Ring) -> torch.Tensor:
    deferred = _deferred_weight_grads(x, [weight])
    ring_reduce: torch.Tensor = _ScatteredProduct.apply(  # type: ignore[no-untyped-call]
        x, ring, deferred, *_matrices(x, [weight], deferred)
    )
    return ring_reduce


@cache
def _outside_graph() -> tuple[Any, Any]:
    """Return both functions excluded from graphs. Created at the first call, because it imports the compiler."""
    disable_compile: Any = torch.compiler.disable
    return disable_compile(_gathered_products), disable_compile(_scattered_product)
