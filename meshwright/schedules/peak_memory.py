"""Peak memory of the ranks of a schedule: activations, and what the halves of a split backward pass store.

A full backward pass frees what its forward pass stored. The first half of a split backward pass frees that too, and
stores what the second half needs: inputs and outputs' gradients of matrix products (M_B and M_W of arXiv 2401.10241,
section 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.schedules.actions import Action, ActionKind, Schedule, Slot


@dataclass(frozen=True, slots=True)
class SavedPerStage:
    """What one micro-batch leaves in one stage, in bytes or in any other unit."""

    forward: float = 1.0
    """From the forward pass to the backward pass or its first half."""
    halfway: float = 1.0
    """From the first half to the second."""


ONE_PER_MICRO_BATCH = SavedPerStage()
"""Counts micro-batches, wherever they are between their forward pass and their weights' gradients."""


def peak_memory(
    schedule: Schedule, saved: SavedPerStage | Sequence[SavedPerStage] = ONE_PER_MICRO_BATCH
) -> tuple[float, ...]:
    """The peak memory of each rank, over all of its actions.

    Args:
        schedule: a valid schedule.
        saved: memory of every stage, or of each stage of the model.

    Raises:
        ValueError: the number of `saved` differs from that of stages.
    """
    saved_by_stage = [saved] * schedule.stages if isinstance(saved, SavedPerStage) else list(saved)
    if len(saved_by_stage) != schedule.stages:
        raise ValueError(f"`saved` must have {schedule.stages} stages, got {len(saved_by_stage)}")
    return tuple(_peak(slots, saved_by_stage) for slots in schedule.ranks)


def _peak(slots: Sequence[Slot], saved: Sequence[SavedPerStage]) -> float:
    current = peak = 0.0
    for slot in slots:
        # Of two actions that overlap, the forward pass may end first.
        for action in slot if len(slot) == 1 else sorted(slot, key=lambda one: one.kind is not ActionKind.FORWARD):
            current += _change(action, saved[action.stage])
            peak = max(peak, current)
    return peak


def _change(action: Action, saved: SavedPerStage) -> float:
    if action.kind is ActionKind.FORWARD:
        return saved.forward
    if action.kind is ActionKind.BACKWARD:
        return -saved.forward
    return saved.halfway - saved.forward if action.kind is ActionKind.INPUT else -saved.halfway
