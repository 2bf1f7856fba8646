"""Moves tokens to the rows that experts compute, and sums the experts' rows by token.

A row is a copy of a token for one of its experts. Both directions are one gather, forward and backward: no copy of the
tokens for each of their experts is made first, and gradients are summed in the order of a token's experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

NO_ROW = -1
"""The place of a choice that was dropped."""


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Which copy of which token each row is."""

    choices: torch.Tensor
    """int64 [rows]: the index of each row among the tokens x per_token choices; `NO_ROW` for an empty row."""
    places: torch.Tensor
    """int64 [tokens, per_token]: the row of each choice, or `NO_ROW`."""
    complete: bool
    """Whether every choice has a row, and every row a choice."""

    def take(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens [tokens, hidden] -> [rows, hidden]; empty rows are 0."""
        per_token = self.places.shape[1]
        # Rounding down keeps `NO_ROW`.
        taken: torch.Tensor = _Taken.apply(  # type: ignore[no-untyped-call]
            tokens, self.choices.div(per_token, rounding_mode="floor"), self.places, self.complete
        )
        return taken

    def by_token(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [rows, hidden] -> [tokens, per_token, hidden]; dropped choices are 0."""
        placed: torch.Tensor = _Placed.apply(rows, self.places, self.choices, self.complete)  # type: ignore[no-untyped-call]
        return placed


def order_by_expert(experts: torch.Tensor, rows: int | None = None) -> RowOrder:
    """Return the order of rows that are sorted by expert, those of one expert by token.

    Args:
        experts: int64 [tokens, per_token]: the expert of each choice; dropped choices have a larger number.
        rows: number of choices that are not dropped; None if no choice is.
    """
    order = experts.flatten().argsort(stable=True)
    row_numbers = torch.arange(len(order), device=order.device)
    places = torch.empty_like(order).scatter_(0, order, row_numbers).view_as(experts)
    if rows is None:
        return RowOrder(order, places, complete=True)
    return RowOrder(order[:rows], places.masked_fill(places >= rows, NO_ROW), complete=False)


def order_in_slots(slots: torch.Tensor, rows: int) -> RowOrder:
    """Return the order of rows of which each choice has its own.

    Args:
        slots: int64 [tokens, per_token]: the row of each choice, or `rows` for a dropped one.
        rows: number of rows; those that no choice has are empty.
    """
    flat = slots.flatten()
    numbers = torch.arange(len(flat), device=flat.device)
    # Dropped choices all write to one more row, which is cut off.
    choices = flat.new_full((rows + 1,), NO_ROW).scatter_(0, flat, numbers)[:rows]
    return RowOrder(choices, slots.masked_fill(slots == rows, NO_ROW), complete=False)


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, source: torch.Tensor, places: torch.Tensor, complete: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.complete = complete
        return _gather(tokens, source, complete=complete)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        (gradient,) = gradients
        summed = _gather(gradient, places.flatten(), complete=ctx.complete).view(*places.shape, -1).sum(1)
        return summed, None, None, None


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, places: torch.Tensor, choices: torch.Tensor, complete: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(choices)
        ctx.complete = complete
        return _gather(rows, places.flatten(), complete=complete).view(*places.shape, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (choices,) = ctx.saved_tensors
        (gradient,) = gradients
        return _gather(gradient.flatten(0, 1), choices, complete=ctx.complete), None, None, None


def _gather(rows: torch.Tensor, index: torch.Tensor, *, complete: bool) -> torch.Tensor:
    """Return the rows with these numbers; 0 for `NO_ROW`."""
    if complete:
        return rows.index_select(0, index)
    if not len(rows):
        return rows.new_zeros(len(index), rows.shape[1])
    return rows.index_select(0, index.clamp(min=0)).masked_fill_((index == NO_ROW).unsqueeze(1), 0)
