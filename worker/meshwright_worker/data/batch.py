"""What a replica trains on in one step: tokens, what to predict, and where each token stands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch

IGNORED = -100
"""A target that is not predicted."""


@dataclass(frozen=True, slots=True)
class TokenMetadata:
    """Where the tokens of a batch stand. Every stage has them: they are not sent along a pipeline."""

    positions: torch.Tensor | None = None
    """int64 [batch, length], what rotary embedding turns by; None for 0, 1, ... in each row."""
    documents: torch.Tensor | None = None
    """int64 [batch, length], which document of its row a token belongs to, never less than before it: attention stays
    inside. None for one."""
    row_length: int | None = None
    """Tokens of a whole row, where a rank holds a slice of it; None where it holds all."""
    row_documents: torch.Tensor | None = None
    """int64 [batch, tokens of a whole row], `documents` of all of it, always on the CPU: what attention leaves out is
    decided there."""
    token_indices: torch.Tensor | None = None
    """int64 [batch, length], the number of each token among all that the run trains on: what dropout draws by."""


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
        """The batch that predicts each next token of samples, int64 [batch, length + 1].

        A token that is not to be predicted stands in a sample as its complement, -1 - token. `numbers` are those of the
        samples in the run; 0, 1, ... when left out.
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
        """What the layers are told of the tokens."""
        return TokenMetadata(self.positions, self.documents, self.row_length, self.row_documents, self.token_indices)

    def chunk(self, count: int) -> list[Self]:
        """`count` micro-batches of the same number of rows.

        Raises:
            ValueError: the rows do not divide.
        """
        rows, rest = divmod(len(self.tokens), count)
        if rest:
            raise ValueError(f"{len(self.tokens)} rows do not divide into {count} micro-batches")
        return [self.each(partial(_rows, first=index * rows, count=rows)) for index in range(count)]

    def to(self, device: torch.device) -> Self:
        """The batch on a device."""
        moved = self.each(lambda tensor: tensor.to(device, non_blocking=True))
        return replace(moved, row_documents=self.row_documents)

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The batch with every tensor that it has changed alike."""
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
