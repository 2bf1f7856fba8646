"""Attention of packed documents with a varlen kernel: of full rows, and over keys that arrive in several parts.

All tensors are [batch, tokens, heads, size], whose rows one after the other are what the kernel takes, without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshwright_worker.dtypes import upcast
from meshwright_worker.parallel.context.online_softmax import PartKernels
from meshwright_worker.parallel.context.varlen_kernels import Places, VarlenCall, attend_varlen, attend_varlen_backward


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: VarlenCall, scale: float
    ) -> torch.Tensor:
        attended, lse = attend_varlen(_tokens(query), _tokens(key), _tokens(value), call, scale)
        ctx.save_for_backward(query, key, value, attended, lse)
        ctx.call, ctx.scale = call, scale
        return torch.unflatten(attended, 0, query.shape[:2])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        query, key, value, attended, lse = ctx.saved_tensors
        parts = attend_varlen_backward(
            _tokens(gradients[0]), _tokens(query), _tokens(key), _tokens(value), attended, lse, ctx.call, ctx.scale
        )
        query_grad, key_grad, value_grad = (
            torch.unflatten(part.to(x.dtype), 0, x.shape[:2])
            for part, x in zip(parts, (query, key, value), strict=True)
        )
        return query_grad, key_grad, value_grad, None, None


def varlen_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: VarlenCall, scale: float
) -> torch.Tensor:
    """Compute attention inside the segments of `call`, which have every query and every key.

    Args:
        query: [batch, length, heads, head size].
        key: [batch, length, key and value heads, head size].
        value: [batch, length, key and value heads, value size].
        call: the segments.
        scale: factor of the scores.

    Returns:
        [batch, length, heads, value size].
    """
    attended: torch.Tensor = _VarlenAttention.apply(query, key, value, call, scale)  # type: ignore[no-untyped-call]
    return attended


class VarlenSoftmax:
    """The output of a rank's queries so far, see `OnlineSoftmax`."""

    def __init__(self, query: torch.Tensor, value_size: int, scale: float) -> None:
        self._shape = query.shape
        self._query = _tokens(query)
        self._scale = scale
        numbers = upcast(query.new_empty(())).dtype
        count, heads = self._query.shape[:2]
        self._attended = query.new_zeros((count, heads, value_size), dtype=numbers)
        self._lse = query.new_full((heads, count), float("-inf"), dtype=numbers)
        self._is_empty = True

    def add(self, key: torch.Tensor, value: torch.Tensor, calls: Sequence[VarlenCall]) -> None:
        """Add more keys; `calls` says which queries attend to them."""
        keys, values = _tokens(key), _tokens(value)
        for call in calls:
            attended, lse = attend_varlen(
                _take(self._query, call.queries), _take(keys, call.keys), _take(values, call.keys), call, self._scale
            )
            if self._is_empty and isinstance(call.queries, slice) and lse.shape == self._lse.shape:
                # Copied, since sums are merged in place and activation checkpointing may keep those of the kernel.
                self._attended, self._lse = attended, lse.clone()
            else:
                self._merge(upcast(attended), upcast(lse), call.queries)
            self._is_empty = False

    def _merge(self, attended: torch.Tensor, lse: torch.Tensor, queries: Places) -> None:
        self._attended = upcast(self._attended)
        before = _take(self._lse, queries, dim=1)
        after = torch.logaddexp(before, lse)
        old, new = ((part - after).exp_().t().unsqueeze(-1) for part in (before, lse))
        merged = _take(self._attended, queries) * old + attended * new
        if isinstance(queries, slice):
            self._attended[queries], self._lse[:, queries] = merged, after
        else:
            self._attended.index_copy_(0, queries, merged)
            self._lse.index_copy_(1, queries, after)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output in the queries' format, and the log-sum-exps, [heads, tokens of all rows]."""
        return torch.unflatten(self._attended.to(self._query.dtype), 0, self._shape[:2]), self._lse


class VarlenGradients:
    """The gradients of a rank's queries, and of each part of the keys and values, see `AttentionGradients`."""

    def __init__(
        self, gradient: torch.Tensor, query: torch.Tensor, attended: torch.Tensor, lse: torch.Tensor, scale: float
    ) -> None:
        self._output_grad, self._query, self._attended = (_tokens(x) for x in (gradient, query, attended))
        self._lse = lse
        self._scale = scale
        self.query_grad = torch.zeros(query.shape, dtype=lse.dtype, device=query.device)

    def add(
        self, key: torch.Tensor, value: torch.Tensor, calls: Sequence[VarlenCall]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's part of the gradients of keys and values, with their shapes, in at least fp32."""
        key_grad, value_grad = (torch.zeros(x.shape, dtype=self._lse.dtype, device=x.device) for x in (key, value))
        for call in calls:
            parts = attend_varlen_backward(
                _take(self._output_grad, call.queries),
                _take(self._query, call.queries),
                _take(_tokens(key), call.keys),
                _take(_tokens(value), call.keys),
                _take(self._attended, call.queries),
                _take(self._lse, call.queries, dim=1),
                call,
                self._scale,
            )
            for whole, part, places in zip(
                (self.query_grad, key_grad, value_grad), parts, (call.queries, call.keys, call.keys), strict=True
            ):
                _add(_tokens(whole), places, part)
        return key_grad, value_grad


VARLEN_KERNELS = PartKernels(VarlenSoftmax, VarlenGradients, tokens=1)
"""Of packed documents, on [batch, tokens, heads, size]."""


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """[batch, tokens, heads, size] -> [tokens of all rows, heads, size]."""
    return x.flatten(0, 1)


def _take(x: torch.Tensor, places: Places, dim: int = 0) -> torch.Tensor:
    if isinstance(places, slice):
        return x.narrow(dim, places.start, places.stop - places.start)
    return x.index_select(dim, places)


def _add(x: torch.Tensor, places: Places, part: torch.Tensor) -> None:
    if isinstance(places, slice):
        x[places] += part
    else:
        x.index_add_(0, places, part.to(x.dtype))
