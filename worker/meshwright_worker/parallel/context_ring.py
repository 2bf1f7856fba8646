"""Ring attention: keys and values travel round the ranks of a group (Liu et al., arXiv 2310.01889).

Each rank keeps its queries. In every turn it works on the keys and values of one rank while it hands them to the next
rank and takes the following ones from the rank before: n - 1 turns. In the backward pass they travel again, and with
them, one turn behind, the gradients that the ranks add up; the n-th hand-over brings those home.

Bytes that a rank sends, with X those of its own keys and values: (n - 1) X forward; backward (n - 1) X and n X of
gradients, which are fp32 where X is of a narrower format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright_worker.parallel.context_blocks import Block
from meshwright_worker.parallel.context_parts import Gradients, Parts

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Ring:
    """What the ranks of a group do with one micro-batch's keys and values."""

    group: dist.ProcessGroup
    blocks: Sequence[Sequence[Block]]
    """Of this rank's queries against each rank's keys, by rank."""
    lengths: Sequence[int]
    """How many keys each rank has."""
    scale: float

    @property
    def rank(self) -> int:
        """This rank's place."""
        return self.group.rank()

    @property
    def ranks(self) -> int:
        """Size of the group."""
        return len(self.lengths)

    def source(self, turn: int) -> int:
        """Whose keys this rank works on."""
        return (self.rank - turn) % self.ranks


class _Handover:
    """Tensors on their way to the next rank, and those that come from the one before."""

    def __init__(self, tensors: Pair, ring: Ring, turn: int) -> None:
        length = ring.lengths[ring.source(turn + 1)]
        self._arriving = tuple(x.new_empty((*x.shape[:2], length, x.shape[3])) for x in tensors)
        after, before = (
            dist.get_global_rank(ring.group, (ring.rank + step) % ring.ranks) for step in (1, ring.ranks - 1)
        )
        operations = []
        for leaving, arriving in zip(tensors, self._arriving, strict=True):
            operations.append(dist.P2POp(dist.isend, leaving, after, ring.group))
            operations.append(dist.P2POp(dist.irecv, arriving, before, ring.group))
        # Kept until they have left: on gloo nothing else holds on to them.
        self._leaving = tensors
        self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> Pair:
        """What came."""
        for work in self._works:
            work.wait()
        key, value = self._arriving
        return key, value


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: Ring) -> torch.Tensor:
        parts = Parts(query, value.shape[-1], ring.scale)
        travelling = own = (key.contiguous(), value.contiguous())
        for turn in range(ring.ranks):
            coming = _Handover(travelling, ring, turn) if turn < ring.ranks - 1 else None
            parts.add(*travelling, ring.blocks[ring.source(turn)])
            if coming is not None:
                travelling = coming.wait()
        mixed, denominator = parts.result()
        ctx.save_for_backward(query, *own, mixed, denominator)
        ctx.ring = ring
        return mixed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        ring: Ring = ctx.ring
        query, key, value, mixed, denominator = ctx.saved_tensors
        sums = Gradients(gradients[0], query, mixed, denominator, ring.scale)
        travelling: Pair = (key, value)
        following: _Handover | None = None
        for turn in range(ring.ranks):
            coming = _Handover(travelling, ring, turn) if turn < ring.ranks - 1 else None
            of_key, of_value = sums.add(*travelling, ring.blocks[ring.source(turn)])
            if following is not None:
                earlier_key, earlier_value = following.wait()
                of_key, of_value = of_key.add_(earlier_key), of_value.add_(earlier_value)
            following = _Handover((of_key, of_value), ring, turn)
            if coming is not None:
                travelling = coming.wait()
        assert following is not None
        of_key, of_value = following.wait()
        return sums.of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None


def ring_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: Ring) -> torch.Tensor:
    """Attention of this rank's queries to every rank's keys. Collective.

    Args:
        query: [batch, heads, own tokens, head size].
        key: [batch, key and value heads, own tokens, head size].
        value: [batch, key and value heads, own tokens, value size].
        ring: the group and its blocks.

    Returns:
        [batch, heads, own tokens, value size].
    """
    mixed: torch.Tensor = _RingAttention.apply(query, key, value, ring)  # type: ignore[no-untyped-call]
    return mixed
