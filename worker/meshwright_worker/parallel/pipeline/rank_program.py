"""The program of one pipeline rank in a step: its slots, and the messages before and after each.

Both ends of a channel know the order of messages without communication. A channel carries them in the order of the
sender's slots, and the receiver, which knows the entire schedule, receives them in that order. Messages therefore need
no tags, which NCCL does not support, and a receive may be posted early.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.schedules.actions import ActionKind, Schedule, Slot

_RECEIVE_AHEAD = 2
"""Number of slots by which receives are posted early: a message that arrives while a slot computes costs no time."""


class Message(NamedTuple):
    """A message between two neighboring stages for one micro-batch: hidden states, or their gradient."""

    gradient: bool
    stage: int
    """The stage that receives it."""
    micro_batch: int
    source: int
    """Pipeline rank that sends it."""
    target: int
    """Pipeline rank that receives it; the same rank if it has both stages."""

    @property
    def key(self) -> tuple[bool, int, int]:
        """The key by which the receiving stage looks it up."""
        return self.gradient, self.stage, self.micro_batch


@dataclass(frozen=True, slots=True)
class ScheduledSlot:
    """One slot of a rank, with its messages."""

    slot: Slot
    receive: tuple[Message, ...]
    """Receives to post before the slot, in this order."""
    sends: tuple[Message | None, ...]
    """The message that each action of the slot produces for another rank, or for another stage of this rank."""


def rank_program(schedule: Schedule, rank: int) -> list[ScheduledSlot]:
    """Return a rank's slots in order."""
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
        # A message in a channel can only be received after all messages before it.
        turn = len(posts)
        for message in reversed(channel):
            turn = min(turn, consumed_at[message.key])
            posts[max(0, turn - _RECEIVE_AHEAD)].insert(0, message)
    slots = zip(schedule.ranks[rank], posts, outputs[rank], strict=True)
    return [ScheduledSlot(slot, tuple(receive), sent) for slot, receive, sent in slots]


def forward_only(schedule: Schedule) -> Schedule:
    """Return the schedule without its backward passes, for evaluation. It cannot deadlock if the full schedule does
    not.
    """
    forward_slots = tuple(
        tuple((action,) for slot in slots for action in slot if action.kind is ActionKind.FORWARD)
        for slots in schedule.ranks
    )
    return replace(schedule, ranks=forward_slots)


def p2p_pairs(schedule: Schedule) -> set[tuple[int, int]]:
    """Return every (source, target) between different ranks."""
    forward_ranks = _forward_ranks(schedule)
    outputs = [
        message for slots in schedule.ranks for slot in slots for message in _outputs_of(slot, schedule, forward_ranks)
    ]
    return {(message.source, message.target) for message in outputs if message and message.source != message.target}


def _forward_ranks(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Return the rank of each (stage, micro-batch): the one that runs its forward pass."""
    return {
        (action.stage, action.micro_batch): rank
        for rank in range(len(schedule.ranks))
        for action in schedule.actions(rank)
        if action.kind is ActionKind.FORWARD
    }


def _outputs_of(
    slot: Slot, schedule: Schedule, forward_ranks: dict[tuple[int, int], int]
) -> tuple[Message | None, ...]:
    """Return the message that each action of a slot produces."""
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
    """Return the messages that a slot needs."""
    messages = []
    for kind, stage, m in slot:
        gradient = kind in (ActionKind.BACKWARD, ActionKind.INPUT)
        producer = stage + 1 if gradient else stage - 1
        if kind is not ActionKind.WEIGHT and 0 <= producer < schedule.stages:
            messages.append(Message(gradient, stage, m, forward_ranks[producer, m], forward_ranks[stage, m]))
    return messages
