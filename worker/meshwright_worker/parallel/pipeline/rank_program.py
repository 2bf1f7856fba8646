"""What one rank of a pipeline does in a step: its slots, what it must have received before each, what it sends after.

Both ends of a channel agree on the order of messages without a word: a channel carries them in the order in which the
sender's slots make them, and the receiver, who knows the whole schedule, takes them in that order. So no message needs
a tag, which NCCL does not have, and a receive that is posted early only waits longer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.schedules.actions import ActionKind, Schedule, Slot

_RECEIVE_AHEAD = 2
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
class ProgramStep:
    """One slot of a rank."""

    slot: Slot
    receive: tuple[Message, ...]
    """What to post a receive for before the slot, in this order."""
    sends: tuple[Message | None, ...]
    """What each action of the slot makes for another rank, or for another stage of this one."""


def rank_program(schedule: Schedule, rank: int) -> list[ProgramStep]:
    """A rank's turns in order."""
    forward_ranks = _forward_ranks(schedule)
    outputs = [[_outputs_of(slot, schedule, forward_ranks) for slot in slots] for slots in schedule.ranks]
    consumed_at = {
        message.key: index
        for index, slot in enumerate(schedule.ranks[rank])
        for message in _inputs_of(slot, schedule, forward_ranks)
    }
    posts: list[list[Message]] = [[] for _ in schedule.ranks[rank]]
    for source in range(len(schedule.ranks)):
        if source == rank:
            continue
        channel = [message for slot in outputs[source] for message in slot if message and message.target == rank]
        # What stands behind a message in its channel can only be taken after it.
        turn = len(posts)
        for message in reversed(channel):
            turn = min(turn, consumed_at[message.key])
            posts[max(0, turn - _RECEIVE_AHEAD)].insert(0, message)
    slots = zip(schedule.ranks[rank], posts, outputs[rank], strict=True)
    return [ProgramStep(slot, tuple(receive), sent) for slot, receive, sent in slots]


def forward_only(schedule: Schedule) -> Schedule:
    """The schedule without its backward passes: what evaluation runs. It cannot be stuck where the whole was not."""
    forward_slots = tuple(
        tuple((action,) for slot in slots for action in slot if action.kind is ActionKind.FORWARD)
        for slots in schedule.ranks
    )
    return replace(schedule, ranks=forward_slots)


def p2p_pairs(schedule: Schedule) -> set[tuple[int, int]]:
    """Every (source, target) between different ranks."""
    forward_ranks = _forward_ranks(schedule)
    outputs = [
        message for slots in schedule.ranks for slot in slots for message in _outputs_of(slot, schedule, forward_ranks)
    ]
    return {(message.source, message.target) for message in outputs if message and message.source != message.target}


def _forward_ranks(schedule: Schedule) -> dict[tuple[int, int], int]:
    """The rank of each (stage, micro-batch): that of its forward pass."""
    return {
        (action.stage, action.micro_batch): rank
        for rank in range(len(schedule.ranks))
        for action in schedule.actions(rank)
        if action.kind is ActionKind.FORWARD
    }


def _outputs_of(
    slot: Slot, schedule: Schedule, forward_ranks: dict[tuple[int, int], int]
) -> tuple[Message | None, ...]:
    """What each action of a slot hands over."""
    messages: list[Message | None] = []
    for kind, stage, m in slot:
        gradient = kind in (ActionKind.BACKWARD, ActionKind.INPUT)
        consumer = stage - 1 if gradient else stage + 1
        has_consumer = kind is not ActionKind.WEIGHT and 0 <= consumer < schedule.stages
        messages.append(
            Message(gradient, consumer, m, forward_ranks[stage, m], forward_ranks[consumer, m])
            if has_consumer
            else None
        )
    return tuple(messages)


def _inputs_of(slot: Slot, schedule: Schedule, forward_ranks: dict[tuple[int, int], int]) -> list[Message]:
    """What a slot takes."""
    messages = []
    for kind, stage, m in slot:
        gradient = kind in (ActionKind.BACKWARD, ActionKind.INPUT)
        producer = stage + 1 if gradient else stage - 1
        if kind is not ActionKind.WEIGHT and 0 <= producer < schedule.stages:
            messages.append(Message(gradient, stage, m, forward_ranks[producer, m], forward_ranks[stage, m]))
    return messages
