"""Attention over keys that arrive in several parts: the softmax so far is corrected with each new part.

Block outputs are merged in at least fp32 using their log-sum-exps (online softmax, arXiv 1805.02867; Liu et al., arXiv
2310.01889).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from meshwright_worker.dtypes import upcast
from meshwright_worker.parallel.context.attention_blocks import AttentionBlock
from meshwright_worker.parallel.context.attention_kernels import attend, attend_backward


class PartSoftmax(Protocol):
    """The output of a rank's queries to the keys so far."""

    def add(self, key: torch.Tensor, value: torch.Tensor, blocks: Sequence[Any], /) -> None:
        """Add more keys; `blocks` says which queries attend to them."""

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output in the queries' format, and the log-sum-exps, which only the same kernels read."""


class PartGradients(Protocol):
    """The gradients of a rank's queries, and of each part of the keys and values as it arrives."""

    query_grad: torch.Tensor

    def add(
        self, key: torch.Tensor, value: torch.Tensor, blocks: Sequence[Any], /
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's part of the gradients of keys and values, with their shapes, in at least fp32."""


@dataclass(frozen=True)
class PartKernels:
    """How attention over keys that arrive in parts is computed."""

    softmax: Callable[[torch.Tensor, int, float], PartSoftmax]
    """Takes the queries, the size of a value's head and the factor of the scores."""
    gradients: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], PartGradients]
    """Takes the output's gradient, the queries, what `PartSoftmax.result` returned, and the factor of the scores."""
    tokens: int
    """The dimension of tokens: 2 if tensors are [batch, heads, tokens, size], 1 if [batch, tokens, heads, size]."""


class OnlineSoftmax:
    """The output of a rank's queries so far.

    Args:
        query: [batch, heads, queries, head size].
        value_size: size of a value's head.
        scale: factor of the scores.
    """

    def __init__(self, query: torch.Tensor, value_size: int, scale: float) -> None:
        self._query = query
        self._scale = scale
        numbers = upcast(query.new_empty(())).dtype
        self._attended = query.new_zeros((*query.shape[:-1], value_size), dtype=numbers)
        self._lse = query.new_full(query.shape[:-1], float("-inf"), dtype=numbers)

    def add(self, key: torch.Tensor, value: torch.Tensor, blocks: Sequence[AttentionBlock]) -> None:
        """Add more keys, [batch, key and value heads, keys, ...]; `blocks` says which queries attend to them."""
        for block in blocks:
            rows, columns = block.rows, block.queries
            attended, lse = attend(
                self._query[rows, :, columns],
                key[rows, :, block.keys],
                value[rows, :, block.keys],
                shape=block.shape,
                scale=self._scale,
            )
            before = self._lse[rows, :, columns]
            after = torch.logaddexp(before, lse)
            old, new = (before - after).exp_().unsqueeze(-1), (lse - after).exp_().unsqueeze(-1)
            self._attended[rows, :, columns] = self._attended[rows, :, columns] * old + attended * new
            self._lse[rows, :, columns] = after

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output in the queries' format, [batch, heads, queries, value size], and the log-sum-exps."""
        return self._attended.to(self._query.dtype), self._lse


class AttentionGradients:
    """The gradients of a rank's queries, and of each part of the keys and values as it arrives.

    Args:
        gradient: that of the output, [batch, heads, queries, value size].
        query: as in the forward pass.
        mixed, denominator: what `OnlineSoftmax.result` returned.
        scale: factor of the scores.
    """

    def __init__(
        self, gradient: torch.Tensor, query: torch.Tensor, attended: torch.Tensor, lse: torch.Tensor, scale: float
    ) -> None:
        self._output_grad = gradient
        self._query = query
        self._attended = attended
        self._lse = lse
        self._scale = scale
        self.query_grad = torch.zeros_like(query, dtype=lse.dtype)

    def add(
        self, key: torch.Tensor, value: torch.Tensor, blocks: Sequence[AttentionBlock]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's part of the gradients of keys and values, with their shapes, in at least fp32."""
        key_grad = torch.zeros_like(key, dtype=self.query_grad.dtype)
        value_grad = torch.zeros_like(value, dtype=self.query_grad.dtype)
        for block in blocks:
            rows, columns = block.rows, block.queries
            query_part, key_part, value_part = attend_backward(
                self._output_grad[rows, :, columns],
                self._query[rows, :, columns],
                key[rows, :, block.keys],
                value[rows, :, block.keys],
                self._attended[rows, :, columns],
                self._lse[rows, :, columns].contiguous(),
                shape=block.shape,
                scale=self._scale,
            )
            self.query_grad[rows, :, columns] += query_part
            key_grad[rows, :, block.keys] += key_part
            value_grad[rows, :, block.keys] += value_part
        return key_grad, value_grad


BLOCK_KERNELS = PartKernels(OnlineSoftmax, AttentionGradients, tokens=2)
"""One kernel for each block."""
