"""The one representation of a pipeline schedule: what every rank does, in order.

An action is a forward pass, a backward pass, or one of its two halves, of one micro-batch through one stage. A slot is
one action, or two that a rank runs overlapped. Stages are numbered along the model; a rank may hold several, and in a
bidirectional pipeline a stage lies on two ranks, each of which runs it for half of the micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple


class ActionKind(StrEnum):
    """What an action computes; the letters are those of torch.distributed.pipelining."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of inputs and weights at once."""
    INPUT = "I"
    """Gradients of inputs alone: what the previous stage waits for."""
    WEIGHT = "W"
    """Gradients of weights, any time after `INPUT`."""


class Action(NamedTuple):
    """One computation."""

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.micro_batch}"


Slot = tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule of one step."""

    name: str
    stages: int
    """Stages of the model, over all ranks."""
    micro_batches: int
    ranks: tuple[tuple[Slot, ...], ...]
    """Each rank's slots in order."""

    @property
    def chunks(self) -> int:
        """Stages that one rank holds."""
        return max(1, len({action.stage for slot in self.ranks[0] for action in slot}))

    def actions(self, rank: int) -> list[Action]:
        """A rank's actions in order, overlapped ones one after the other."""
        return [action for slot in self.ranks[rank] for action in slot]

    def serialized(self) -> Schedule:
        """The schedule with overlapped actions one after the other: what a rank does that computes one at a time."""
        return replace(self, ranks=tuple(tuple((a,) for slot in slots for a in slot) for slots in self.ranks))

    def render(self, rank: int) -> str:
        """A rank's slots as text, overlapped actions joined by `+`."""
        return " ".join("+".join(str(action) for action in slot) for slot in self.ranks[rank])


def one(kind: ActionKind, stage: int, micro_batch: int) -> Slot:
    """A slot of one action."""
    return (Action(kind, stage, micro_batch),)


def check_counts(ranks: int, micro_batches: int) -> None:
    """Raises ValueError unless there is at least one rank and one micro-batch."""
    if ranks < 1 or micro_batches < 1:
        raise ValueError(f"a pipeline needs at least one rank and one micro-batch, got {ranks} and {micro_batches}")
