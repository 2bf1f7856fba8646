"""All-gather context parallelism (Llama 3, arXiv 2407.21783, section 3.3.2): every rank sees all keys and values.

They are gathered before attention, and gathered again in the backward pass rather than kept; their gradients are then
reduced and scattered. With grouped heads keys and values are small, and one collective of a known size suits masks and
networks on which a ring's many small messages do not. Bytes that a rank takes in, with X those of its own keys and
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

from meshwright.runs.context_slices import Slice, size
from meshwright_worker.parallel.collectives import gather_positions, scatter_sum_of_positions
from meshwright_worker.parallel.context_blocks import Block
from meshwright_worker.parallel.context_parts import Gradients, Parts

_TOKENS = 2


@dataclass(frozen=True)
class Gathering:
    """What the ranks of a group do with one micro-batch's keys and values."""

    group: dist.ProcessGroup | None
    """None where one rank has whole rows."""
    slices: Sequence[Slice]
    """What each rank holds of a row."""
    blocks: Sequence[Block]
    """Of this rank's queries against the keys of the whole row, in its order."""
    scale: float

    @property
    def longest(self) -> int:
        """Tokens of the longest slice: a collective moves as many for every rank."""
        return max(size(part) for part in self.slices)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, heads, own tokens, size] of each rank -> [batch, heads, tokens of the row, size], in row order."""
        if self.group is None:
            return x
        padded = F.pad(x, (0, 0, 0, self.longest - x.shape[_TOKENS])).transpose(1, _TOKENS)
        order = _order(tuple(self.slices), self.longest, x.device)
        return gather_positions(padded, self.group)[:, order].transpose(1, _TOKENS)

    def scatter_sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of [batch, heads, tokens of the row, size], of which each keeps its own tokens."""
        if self.group is None:
            return x
        own = size(self.slices[self.group.rank()])
        by_rank = x.new_zeros((x.shape[0], len(self.slices) * self.longest, x.shape[1], x.shape[3]))
        by_rank[:, _order(tuple(self.slices), self.longest, x.device)] = x.transpose(1, _TOKENS)
        return scatter_sum_of_positions(by_rank, self.group)[:, :own].transpose(1, _TOKENS)


@lru_cache(maxsize=8)
def _order(slices: tuple[Slice, ...], longest: int, device: torch.device) -> torch.Tensor:
    """Where each token of the row lies among what was gathered, int64 [tokens of the row].

    Remembered: every layer asks for the same, and the copy to the device would hold the host up each time.
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
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gathering: Gathering
    ) -> torch.Tensor:
        parts = Parts(query, value.shape[-1], gathering.scale)
        parts.add(*_whole(key, value, gathering), gathering.blocks)
        mixed, denominator = parts.result()
        ctx.save_for_backward(query, key, value, mixed, denominator)
        ctx.gathering = gathering
        return mixed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        query, key, value, mixed, denominator = ctx.saved_tensors
        gathering: Gathering = ctx.gathering
        sums = Gradients(gradients[0], query, mixed, denominator, gathering.scale)
        both = torch.cat(sums.add(*_whole(key, value, gathering), gathering.blocks), dim=-1)
        sizes = [key.shape[-1], value.shape[-1]]
        of_key, of_value = torch.split(gathering.scatter_sum(both), sizes, dim=-1)
        return sums.of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None


def _whole(key: torch.Tensor, value: torch.Tensor, gathering: Gathering) -> tuple[torch.Tensor, torch.Tensor]:
    both = gathering.gather(torch.cat((key, value), dim=-1))
    whole_key, whole_value = torch.split(both, [key.shape[-1], value.shape[-1]], dim=-1)
    return whole_key, whole_value


def gathered_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gathering: Gathering
) -> torch.Tensor:
    """Attention of this rank's queries to the keys of whole rows. Collective, but where one rank has whole rows.

    Args:
        query: [batch, heads, own tokens, head size].
        key: [batch, key and value heads, own tokens, head size].
        value: [batch, key and value heads, own tokens, value size].
        gathering: the group and its blocks.

    Returns:
        [batch, heads, own tokens, value size].
    """
    mixed: torch.Tensor = _GatheredAttention.apply(query, key, value, gathering)  # type: ignore[no-untyped-call]
    return mixed
