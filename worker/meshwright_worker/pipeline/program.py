"""What one rank of a pipeline does in a step: its slots, what it must have received before each, what it sends after.

Both ends of a channel agree on the order of messages without a word: a channel carries them in the order in which the
sender's slots make them, and the receiver, who knows the whole schedule, takes them in that order. So no message needs
a tag, which NCCL does not have, and a receive that is posted early only waits longer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.schedules.actions import Kind, Schedule, Slot

_AHEAD = 2
"""Slots ahead of which receives are posted: what arrives while a slot computes costs no time."""


class Message(NamedTuple):
    """What one stage hands to its neighbour for one micro-batch: hidden states, or their gradient."""

    gradient: bool
    stage: int
    """The stage that takes it."""
    micro_batch: int
    source: int
    """Pipeline rank that makes it."""
    target: int
    """Pipeline rank that takes it; the same rank where both stages lie on one."""

    @property
    def key(self) -> tuple[bool, int, int]:
        """What the taker asks for."""
        return self.gradient, self.stage, self.micro_batch


@dataclass(frozen=True, slots=True)
class Turn:
    """One slot of a rank."""

    slot: Slot
    receive: tuple[Message, ...]
    """What to post a receive for before the slot, in this order."""
    hand_over: tuple[Message | None, ...]
    """What each action of the slot makes for another rank, or for another stage of this one."""


def program(schedule: Schedule, rank: int) -> list[Turn]:
    """A rank's turns in order."""
    homes = _homes(schedule)
    made = [[_made(slot, schedule, homes) for slot in slots] for slots in schedule.ranks]
    needed_at = {
        message.key: index
        for index, slot in enumerate(schedule.ranks[rank])
        for message in _needed(slot, schedule, homes)
    }
    posts: list[list[Message]] = [[] for _ in schedule.ranks[rank]]
    for source in range(len(schedule.ranks)):
        if source == rank:
            continue
        channel = [message for slot in made[source] for message in slot if message and message.target == rank]
        # What stands behind a message in its channel can only be taken after it.
        turn = len(posts)
        for message in reversed(channel):
            turn = min(turn, needed_at[message.key])
            posts[max(0, turn - _AHEAD)].insert(0, message)
    slots = zip(schedule.ranks[rank], posts, made[rank], strict=True)
    return [Turn(slot, tuple(receive), give) for slot, receive, give in slots]


def forward_only(schedule: Schedule) -> Schedule:
    """The schedule without its backward passes: what evaluation runs. It cannot be stuck where the whole was not."""
    kept = tuple(
        tuple((action,) for slot in slots for action in slot if action.kind is Kind.FORWARD) for slots in schedule.ranks
    )
    return replace(schedule, ranks=kept)


def channels(schedule: Schedule) -> set[tuple[int, int]]:
    """Every (source, target) between different ranks."""
    homes = _homes(schedule)
    made = [message for slots in schedule.ranks for slot in slots for message in _made(slot, schedule, homes)]
    return {(message.source, message.target) for message in made if message and message.source != message.target}


def _homes(schedule: Schedule) -> dict[tuple[int, int], int]:
    """The rank of each (stage, micro-batch): that of its forward pass."""
    return {
        (action.stage, action.micro_batch): rank
        for rank in range(len(schedule.ranks))
        for action in schedule.actions(rank)
        if action.kind is Kind.FORWARD
    }


def _made(slot: Slot, schedule: Schedule, homes: dict[tuple[int, int], int]) -> tuple[Message | None, ...]:
    """What each action of a slot hands over."""
    found: list[Message | None] = []
    for kind, stage, m in slot:
        gradient = kind in (Kind.BACKWARD, Kind.INPUT)
        taker = stage - 1 if gradient else stage + 1
        gives = kind is not Kind.WEIGHT and 0 <= taker < schedule.stages
        found.append(Message(gradient, taker, m, homes[stage, m], homes[taker, m]) if gives else None)
    return tuple(found)


def _needed(slot: Slot, schedule: Schedule, homes: dict[tuple[int, int], int]) -> list[Message]:
    """What a slot takes."""
    found = []
    for kind, stage, m in slot:
        gradient = kind in (Kind.BACKWARD, Kind.INPUT)
        maker = stage + 1 if gradient else stage - 1
        if kind is not Kind.WEIGHT and 0 <= maker < schedule.stages:
            found.append(Message(gradient, stage, m, homes[maker, m], homes[stage, m]))
    return found
