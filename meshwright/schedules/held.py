"""What the ranks of a schedule hold at their peak: activations until a backward pass, and what its halves leave.

A whole backward pass frees what its forward pass kept. The first of two halves frees that too, and leaves what the
second one needs: inputs and outputs' gradients of matrix products (M_B and M_W of arXiv 2401.10241, section 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.schedules.actions import Action, Kind, Schedule, Slot


@dataclass(frozen=True, slots=True)
class Kept:
    """What one micro-batch leaves in one stage, in bytes or in any other unit."""

    forward: float = 1.0
    """From the forward pass to the backward pass or its first half."""
    halfway: float = 1.0
    """From the first half to the second."""


EACH = Kept()
"""Counts micro-batches, wherever they are between their forward pass and their weights' gradients."""


def peaks(schedule: Schedule, kept: Kept | Sequence[Kept] = EACH) -> tuple[float, ...]:
    """The most that each rank holds at once, after any of its actions.

    Args:
        schedule: a valid one.
        kept: in every stage alike, or in each stage of the model.

    Raises:
        ValueError: there are not as many of `kept` as stages.
    """
    every = [kept] * schedule.stages if isinstance(kept, Kept) else list(kept)
    if len(every) != schedule.stages:
        raise ValueError(f"what is kept in {len(every)} stages, for {schedule.stages} stages")
    return tuple(_peak(slots, every) for slots in schedule.ranks)


def _peak(slots: Sequence[Slot], kept: Sequence[Kept]) -> float:
    held = most = 0.0
    for slot in slots:
        # Of two actions that overlap, the forward pass may end first.
        for action in slot if len(slot) == 1 else sorted(slot, key=lambda one: one.kind is not Kind.FORWARD):
            held += _change(action, kept[action.stage])
            most = max(most, held)
    return most


def _change(action: Action, kept: Kept) -> float:
    if action.kind is Kind.FORWARD:
        return kept.forward
    if action.kind is Kind.BACKWARD:
        return -kept.forward
    return kept.halfway - kept.forward if action.kind is Kind.INPUT else -kept.halfway
