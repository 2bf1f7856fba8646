"""Ring attention: keys and values are passed around the ranks of a group (Liu et al., arXiv 2310.01889).

Each rank keeps its queries. In each of n - 1 turns it computes with the keys and values of one rank, sends them to the
next rank and receives others from the previous rank. In the backward pass they are passed around again, followed one
turn later by the gradients that the ranks sum; the n-th transfer returns those to their rank.

Bytes that a rank sends, with X the size of its keys and values: (n - 1) X forward; backward (n - 1) X and n X of
gradients, which are in fp32 even if X is in a narrower format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright_worker.distributed.collectives import RingTransfer
from meshwright_worker.parallel.context.online_softmax import BLOCK_KERNELS, PartKernels

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class RingPlan:
    """The group and the attention blocks for one micro-batch."""

    group: dist.ProcessGroup
    blocks: Sequence[Sequence[Any]]
    """What `kernels` take, of this rank's queries against each rank's keys, by rank."""
    lengths: Sequence[int]
    """Number of keys of each rank."""
    scale: float
    kernels: PartKernels = BLOCK_KERNELS

    @property
    def rank(self) -> int:
        """This rank's index."""
        return self.group.rank()

    @property
    def ranks(self) -> int:
        """Size of the group."""
        return len(self.lengths)

    def source(self, turn: int) -> int:
        """The rank whose keys this rank currently processes."""
        return (self.rank - turn) % self.ranks

    def pass_on(self, tensors: Pair, turn: int) -> RingTransfer:
        """Send tensors to the next rank, and receive those of the next turn."""
        length = self.lengths[self.source(turn + 1)]
        before = self.kernels.tokens
        received = [x.new_empty((*x.shape[:before], length, *x.shape[before + 1 :])) for x in tensors]
        return RingTransfer(tensors, received, self.group)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: RingPlan) -> torch.Tensor:
        online_softmax = ring.kernels.softmax(query, value.shape[-1], ring.scale)
        key_value = own = (key.contiguous(), value.contiguous())
        for turn in range(ring.ranks):
            transfer = ring.pass_on(key_value, turn) if turn < ring.ranks - 1 else None
            online_softmax.add(*key_value, ring.blocks[ring.source(turn)])
            if transfer is not None:
                received_key, received_value = transfer.wait()
                key_value = (received_key, received_value)
        attended, lse = online_softmax.result()
        ctx.save_for_backward(query, *own, attended, lse)
        ctx.ring = ring
        return attended

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        ring: RingPlan = ctx.ring
        query, key, value, attended, lse = ctx.saved_tensors
        grads = ring.kernels.gradients(gradients[0], query, attended, lse, ring.scale)
        key_value: Pair = (key, value)
        gradient_transfer: RingTransfer | None = None
        for turn in range(ring.ranks):
            transfer = ring.pass_on(key_value, turn) if turn < ring.ranks - 1 else None
            key_grad, value_grad = grads.add(*key_value, ring.blocks[ring.source(turn)])
            if gradient_transfer is not None:
                earlier_key_grad, earlier_value_grad = gradient_transfer.wait()
                key_grad, value_grad = key_grad.add_(earlier_key_grad), value_grad.add_(earlier_value_grad)
            # A ring of one rank has the sums already, and gloo cannot send to itself.
            gradient_transfer = ring.pass_on((key_grad, value_grad), turn) if ring.ranks > 1 else None
            if transfer is not None:
                received_key, received_value = transfer.wait()
                key_value = (received_key, received_value)
        if gradient_transfer is not None:
            key_grad, value_grad = gradient_transfer.wait()
        return grads.query_grad.to(query.dtype), key_grad.to(key.dtype), value_grad.to(value.dtype), None


def ring_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: RingPlan) -> torch.Tensor:
    """Compute attention of this rank's queries to every rank's keys. Collective.

    Args:
        query: [batch, heads, own tokens, head size], or [batch, own tokens, heads, head size] if `ring.kernels` take
            tokens first; so with the others.
        key: [batch, key and value heads, own tokens, head size].
        value: [batch, key and value heads, own tokens, value size].
        ring: the group and its blocks.

    Returns:
        [batch, heads, own tokens, value size].
    """
    attended: torch.Tensor = _RingAttention.apply(query, key, value, ring)  # type: ignore[no-untyped-call]
    return attended
