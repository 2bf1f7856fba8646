"""All-gather context parallelism (Llama 3, arXiv 2407.21783, section 3.3.2): every rank gets all keys and values.

They are gathered before attention, and gathered again in the backward pass instead of saved; their gradients are then
reduce-scattered. With grouped heads, keys and values are small. One collective of a known size works with masks, and on
networks that are slow for a ring's many small messages. Bytes that a rank receives, with X the size of its keys and
values and n ranks: (n - 1) X forward, 2 (n - 1) X backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from meshwright.sequence_sharding import TokenSlice, size
from meshwright_worker.distributed.collectives import all_gather_sequence, reduce_scatter_sequence
from meshwright_worker.parallel.context.online_softmax import BLOCK_KERNELS, PartKernels


@dataclass(frozen=True)
class AllGatherPlan:
    """The group and the attention blocks for one micro-batch."""

    group: dist.ProcessGroup | None
    """None if one rank has full rows."""
    slices: Sequence[TokenSlice]
    """The slice of a row that each rank has."""
    blocks: Sequence[Any]
    """What `kernels` take, of this rank's queries against the keys of the full row, in row order."""
    scale: float
    kernels: PartKernels = BLOCK_KERNELS

    @property
    def longest(self) -> int:
        """Tokens of the longest slice: a collective moves the same number for every rank."""
        return max(size(part) for part in self.slices)

    def prepare(self, device: torch.device) -> None:
        """Compute what is cached for `gather` and `scatter_sum`."""
        _order(tuple(self.slices), self.longest, device)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, heads, own tokens, size] of each rank -> [batch, heads, tokens of the row, size], in row order."""
        if self.group is None:
            return x
        x = x.transpose(1, self.kernels.tokens)
        padded = F.pad(x, (0, 0, 0, 0, 0, self.longest - x.shape[1]))
        order = _order(tuple(self.slices), self.longest, x.device)
        return all_gather_sequence(padded, self.group)[:, order].transpose(1, self.kernels.tokens)

    def scatter_sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum [batch, heads, tokens of the row, size] over ranks; each rank gets its own tokens."""
        if self.group is None:
            return x
        own = size(self.slices[self.group.rank()])
        x = x.transpose(1, self.kernels.tokens)
        by_rank = x.new_zeros((x.shape[0], len(self.slices) * self.longest, *x.shape[2:]))
        by_rank[:, _order(tuple(self.slices), self.longest, x.device)] = x
        return reduce_scatter_sequence(by_rank, self.group)[:, :own].transpose(1, self.kernels.tokens)


@lru_cache(maxsize=8)
def _order(slices: tuple[TokenSlice, ...], longest: int, device: torch.device) -> torch.Tensor:
    """Return the index of each token of the row among the gathered tokens, int64 [tokens of the row].

    Cached: every layer needs the same, and copying it to the device would block the host each time.
    """
    places = torch.empty(sum(size(part) for part in slices), dtype=torch.int64)
    for rank, part in enumerate(slices):
        begin = rank * longest
        for positions in part:
            places[positions.start : positions.stop] = torch.arange(begin, begin + len(positions))
            begin += len(positions)
    return places.to(device)


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: AllGatherPlan
    ) -> torch.Tensor:
        online_softmax = plan.kernels.softmax(query, value.shape[-1], plan.scale)
        online_softmax.add(*_gather_key_value(key, value, plan), plan.blocks)
        attended, lse = online_softmax.result()
        ctx.save_for_backward(query, key, value, attended, lse)
        ctx.plan = plan
        return attended

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        query, key, value, attended, lse = ctx.saved_tensors
        plan: AllGatherPlan = ctx.plan
        grads = plan.kernels.gradients(gradients[0], query, attended, lse, plan.scale)
        both = torch.cat(grads.add(*_gather_key_value(key, value, plan), plan.blocks), dim=-1)
        sizes = [key.shape[-1], value.shape[-1]]
        key_grad, value_grad = torch.split(plan.scatter_sum(both), sizes, dim=-1)
        return grads.query_grad.to(query.dtype), key_grad.to(key.dtype), value_grad.to(value.dtype), None


def _gather_key_value(key: torch.Tensor, value: torch.Tensor, plan: AllGatherPlan) -> tuple[torch.Tensor, torch.Tensor]:
    both = plan.gather(torch.cat((key, value), dim=-1))
    whole_key, whole_value = torch.split(both, [key.shape[-1], value.shape[-1]], dim=-1)
    return whole_key, whole_value


def gathered_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: AllGatherPlan
) -> torch.Tensor:
    """Compute attention of this rank's queries to the keys of full rows. Collective, unless one rank has full rows.

    Args:
        query: [batch, heads, own tokens, head size], or [batch, own tokens, heads, head size] if `plan.kernels` take
            tokens first; so with the others.
        key: [batch, key and value heads, own tokens, head size].
        value: [batch, key and value heads, own tokens, value size].
        plan: the group and its blocks.

    Returns:
        [batch, heads, own tokens, value size].
    """
    attended: torch.Tensor = _GatheredAttention.apply(query, key, value, plan)  # type: ignore[no-untyped-call]
    return attended
