"""Attention over keys that come in several parts: each part's softmax is corrected as the next one arrives.

What blocks give is put together in at least fp32 by the denominators of their softmaxes (online softmax, arXiv
1805.02867; Liu et al., arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright_worker.parallel.context_blocks import Block
from meshwright_worker.parallel.context_kernels import attend, attend_backward
from meshwright_worker.precision import wide


class Parts:
    """The output of a rank's queries so far.

    Args:
        query: [batch, heads, queries, head size].
        value_size: size of a value's head.
        scale: factor of the scores.
    """

    def __init__(self, query: torch.Tensor, value_size: int, scale: float) -> None:
        self._query = query
        self._scale = scale
        numbers = wide(query.new_empty(())).dtype
        self._mixed = query.new_zeros((*query.shape[:-1], value_size), dtype=numbers)
        self._denominator = query.new_full(query.shape[:-1], float("-inf"), dtype=numbers)

    def add(self, key: torch.Tensor, value: torch.Tensor, blocks: Sequence[Block]) -> None:
        """Let the queries see some more keys, [batch, key and value heads, keys, ...], those of the blocks."""
        for block in blocks:
            rows, columns = block.rows, block.queries
            mixed, denominator = attend(
                self._query[rows, :, columns],
                key[rows, :, block.keys],
                value[rows, :, block.keys],
                causal=block.causal,
                scale=self._scale,
            )
            before = self._denominator[rows, :, columns]
            after = torch.logaddexp(before, denominator)
            old, new = (before - after).exp_().unsqueeze(-1), (denominator - after).exp_().unsqueeze(-1)
            self._mixed[rows, :, columns] = self._mixed[rows, :, columns] * old + mixed * new
            self._denominator[rows, :, columns] = after

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The mix in the queries' format, [batch, heads, queries, value size], and the denominators' logarithms."""
        return self._mixed.to(self._query.dtype), self._denominator


class Gradients:
    """The gradients of a rank's queries, and of each part of the keys and values as it comes by.

    Args:
        gradient: that of the output, [batch, heads, queries, value size].
        query: as in the forward pass.
        mixed, denominator: what `Parts.result` gave.
        scale: factor of the scores.
    """

    def __init__(
        self, gradient: torch.Tensor, query: torch.Tensor, mixed: torch.Tensor, denominator: torch.Tensor, scale: float
    ) -> None:
        self._of_output = gradient
        self._query = query
        self._mixed = mixed
        self._denominator = denominator
        self._scale = scale
        self.of_query = torch.zeros_like(query, dtype=denominator.dtype)

    def add(self, key: torch.Tensor, value: torch.Tensor, blocks: Sequence[Block]) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the gradients of some keys and values, shaped like them, in at least fp32."""
        of_key = torch.zeros_like(key, dtype=self.of_query.dtype)
        of_value = torch.zeros_like(value, dtype=self.of_query.dtype)
        for block in blocks:
            rows, columns = block.rows, block.queries
            query_part, key_part, value_part = attend_backward(
                self._of_output[rows, :, columns],
                self._query[rows, :, columns],
                key[rows, :, block.keys],
                value[rows, :, block.keys],
                self._mixed[rows, :, columns],
                self._denominator[rows, :, columns].contiguous(),
                causal=block.causal,
                scale=self._scale,
            )
            self.of_query[rows, :, columns] += query_part
            of_key[rows, :, block.keys] += key_part
            of_value[rows, :, block.keys] += value_part
        return of_key, of_value
