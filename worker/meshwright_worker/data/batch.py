"""A replica's data for one step: tokens, targets, and each token's position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch

from meshwright.api.data import DataSpec, Packing

IGNORED = -100
"""The target of a token that has none."""


@dataclass(frozen=True, slots=True)
class TokenMetadata:
    """Positions and documents of the tokens of a batch. Every stage has them: they are not sent along a pipeline."""

    positions: torch.Tensor | None = None
    """int64 [batch, length], positions for rotary embedding; None for 0, 1, ... in each row."""
    documents: torch.Tensor | None = None
    """int64 [batch, length], the document of each token in its row, never decreasing. Attention stays inside a
    document. None for one document per row.
    """
    row_length: int | None = None
    """Tokens of a full row, if this rank has a slice of it; None if it has all of it."""
    row_documents: torch.Tensor | None = None
    """int64 [batch, tokens of a full row], `documents` of the entire row, always on the CPU: attention blocks are
    determined there.
    """
    token_indices: torch.Tensor | None = None
    """int64 [batch, length], the index of each token among all training tokens of the run: dropout's random numbers
    depend on it.
    """


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of a step, or of one of its micro-batches."""

    tokens: torch.Tensor
    """int64 [batch, length]."""
    targets: torch.Tensor
    """The tokens to predict, int64 [batch, length]; `IGNORED` where there is none."""
    positions: torch.Tensor | None = None
    """See `TokenMetadata`."""
    documents: torch.Tensor | None = None
    """See `TokenMetadata`."""
    row_length: int | None = None
    """See `TokenMetadata`."""
    row_documents: torch.Tensor | None = None
    """See `TokenMetadata`."""
    token_indices: torch.Tensor | None = None
    """See `TokenMetadata`."""

    @classmethod
    def of(cls, samples: torch.Tensor, numbers: Sequence[int] | None = None) -> Self:
        """Build the batch that predicts each next token of samples, int64 [batch, length + 1].

        In a sample, a token that is not a target is stored as its complement, -1 - token. `numbers` are the samples'
        numbers in the run; 0, 1, ... by default.
        """
        rows, length = len(samples), samples.shape[1] - 1
        each = torch.tensor(range(rows) if numbers is None else numbers, device=samples.device)
        token_indices = each.unsqueeze(1) * length + torch.arange(length, device=samples.device)
        is_given = samples < 0
        if not is_given.any():
            return cls(samples[:, :-1], samples[:, 1:], token_indices=token_indices)
        tokens = torch.where(is_given, ~samples, samples)
        return cls(tokens[:, :-1], tokens[:, 1:].masked_fill(is_given[:, 1:], IGNORED), token_indices=token_indices)

    @property
    def token_metadata(self) -> TokenMetadata:
        """Return the metadata of the tokens for the layers."""
        return TokenMetadata(self.positions, self.documents, self.row_length, self.row_documents, self.token_indices)

    def chunk(self, count: int) -> list[Self]:
        """Split into `count` micro-batches with the same number of rows.

        Raises:
            ValueError: the rows do not divide evenly.
        """
        rows, rest = divmod(len(self.tokens), count)
        if rest:
            raise ValueError(f"{len(self.tokens)} rows do not divide into {count} micro-batches")
        return [self.each(partial(_rows, first=index * rows, count=rows)) for index in range(count)]

    def to(self, device: torch.device) -> Self:
        """Return the batch on a device."""
        moved = self.each(lambda tensor: tensor.to(device, non_blocking=True))
        return replace(moved, row_documents=self.row_documents)

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return the batch with `change` applied to every tensor."""
        return type(self)(
            change(self.tokens),
            change(self.targets),
            None if self.positions is None else change(self.positions),
            None if self.documents is None else change(self.documents),
            self.row_length,
            None if self.row_documents is None else change(self.row_documents),
            None if self.token_indices is None else change(self.token_indices),
        )


def _rows(tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
    return tensor[first : first + count]


def make_batch(samples: torch.Tensor, data: DataSpec, separator: int, numbers: Sequence[int] | None = None) -> Batch:
    """Build the batch that predicts each next token of samples, int64 [rows, length + 1], packed as `data` requires.

    `numbers` are the samples' numbers in the run, see `Batch.of`.
    """
    batch = Batch.of(samples, numbers)
    return separate_documents(batch, separator) if data.packing is Packing.DOCUMENTS else batch


def separate_documents(batch: Batch, separator: int) -> Batch:
    """Build a batch of rows whose documents end with `separator`, and mark each token's document.

    A row may begin and end inside a document: each piece counts as a document. Each is trained on as if it had its own
    row: positions restart, attention stays inside it (`TokenMetadata`), and its last token does not predict the next
    document. Packing therefore changes neither loss nor gradient; it only removes padding (arXiv 2107.02027).
    """
    tokens = batch.tokens
    ends = tokens == separator
    documents = ends.cumsum(dim=1) - ends.long()
    index = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    begins = torch.ones_like(ends)
    begins[:, 1:] = ends[:, :-1]
    starts = torch.where(begins, index, 0).cummax(dim=1).values
    targets = batch.targets.masked_fill(ends, IGNORED)
    return replace(batch, targets=targets, positions=index - starts, documents=documents)
