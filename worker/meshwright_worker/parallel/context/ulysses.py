"""DeepSpeed-Ulysses: exchanges heads for tokens (Jacobs et al., arXiv 2309.14509).

An all-to-all before attention gives each rank full rows for its share of the heads; another one afterwards returns its
tokens for all heads. Any attention can run in between. If there are fewer key and value heads than ranks, each is sent
to every rank whose query heads use it. Bytes that a rank sends, for each of the four tensors with Y bytes here and n
ranks: (n - 1) / n Y, both forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

_HEADS = 2


class _Exchange(torch.autograd.Function):
    """[batch, tokens, width], of which part i is for rank i, -> those parts of every rank, one after the other.

    Splits the width and concatenates tokens or, with `to_tokens`, splits tokens and concatenates the width.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, lengths: Sequence[int], to_tokens: bool
    ) -> torch.Tensor:
        ctx.group, ctx.lengths, ctx.to_tokens = group, lengths, to_tokens
        return (_to_tokens if to_tokens else _to_heads)(x, group, lengths)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return (_to_heads if ctx.to_tokens else _to_tokens)(gradients[0], ctx.group, ctx.lengths), None, None, None


def _to_heads(x: torch.Tensor, group: dist.ProcessGroup, lengths: Sequence[int]) -> torch.Tensor:
    """[batch, own tokens, width] -> [batch, all tokens, width / ranks]."""
    ranks, own = len(lengths), lengths[group.rank()]
    sent = torch.unflatten(x, -1, (ranks, -1)).permute(2, 1, 0, 3).flatten(0, 1).contiguous()
    received = x.new_empty((sum(lengths), x.shape[0], x.shape[-1] // ranks))
    dist.all_to_all_single(received, sent, list(lengths), [own] * ranks, group=group)
    return received.transpose(0, 1)


def _to_tokens(x: torch.Tensor, group: dist.ProcessGroup, lengths: Sequence[int]) -> torch.Tensor:
    """[batch, all tokens, width / ranks] -> [batch, own tokens, width]."""
    ranks, own = len(lengths), lengths[group.rank()]
    sent = x.transpose(0, 1).contiguous()
    received = x.new_empty((ranks * own, x.shape[0], x.shape[-1]))
    dist.all_to_all_single(received, sent, [own] * ranks, list(lengths), group=group)
    return torch.unflatten(received, 0, (ranks, own)).permute(2, 1, 0, 3).flatten(2)


def exchange_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup, lengths: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the group's tokens for this rank's share of the heads, in one all-to-all.

    Args:
        query: [batch, own tokens, heads, head size].
        key: [batch, own tokens, key and value heads, head size].
        value: [batch, own tokens, key and value heads, value size].
        group: the ranks that share the heads, in the order of their tokens.
        lengths: number of tokens of each rank.

    Returns:
        The three as [batch, all tokens, share of the heads, size]; at least one key and value head.
    """
    ranks = len(lengths)
    parts = [_by_rank(x, ranks) for x in (query, key, value)]
    exchanged: torch.Tensor = _Exchange.apply(  # type: ignore[no-untyped-call]
        torch.cat(parts, dim=-1).flatten(2), group, tuple(lengths), False
    )
    widths = [part.shape[-1] for part in parts]
    sizes = [x.shape[-1] for x in (query, key, value)]
    query, key, value = (
        torch.unflatten(part, -1, (-1, size))
        for part, size in zip(torch.split(exchanged, widths, dim=-1), sizes, strict=True)
    )
    return query, key, value


def return_tokens(attended: torch.Tensor, group: dist.ProcessGroup, lengths: Sequence[int]) -> torch.Tensor:
    """[batch, all tokens, share of the heads, size] -> [batch, own tokens, heads, size]."""
    size = attended.shape[-1]
    returned: torch.Tensor = _Exchange.apply(attended.flatten(2), group, tuple(lengths), True)  # type: ignore[no-untyped-call]
    return torch.unflatten(returned, -1, (-1, size))


def _by_rank(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """[batch, tokens, heads, size] -> [batch, tokens, ranks, width]: the part for each rank."""
    heads = x.shape[_HEADS]
    if heads < ranks:
        x = x.repeat_interleave(ranks // heads, dim=_HEADS)
    return torch.unflatten(x, _HEADS, (ranks, -1)).flatten(3)
