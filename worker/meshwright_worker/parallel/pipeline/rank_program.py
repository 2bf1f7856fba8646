"""The program of one pipeline rank in a step: its slots, and the messages before and after each.

Both ends of a channel know the order of messages without communication. A channel carries them in the order of the
sender's slots, and the receiver, which knows the entire schedule, receives them in that order. Messages therefore need
no tags, which NCCL does not support.

On NCCL a receive is a kernel that occupies the device until its message arrives, and a send one that occupies it until
its message is received. Some calls wait for everything on the device: the first launch of a kernel, the creation of a
communicator, the release of memory by the allocator. Such a wait must never depend on a later slot of the same rank.
All ranks therefore derive their programs from one order of all slots of the schedule, in which each slot follows the
slots that it depends on. A message is sent, and its receive is posted, at the place of the sender's slot in that order.
Then the first slot or message in the order that is not complete depends on nothing that comes later on any rank, so
every program ends, wherever ranks wait for their devices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from meshwright.schedules.actions import ActionKind, Schedule, Slot
from meshwright.schedules.simulator import simulate


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
    return rank_programs(schedule)[rank]


def rank_programs(schedule: Schedule) -> list[list[ScheduledSlot]]:
    """Return the slots of every rank in order."""
    forward_ranks = _forward_ranks(schedule)
    outputs = [[_outputs_of(slot, schedule, forward_ranks) for slot in slots] for slots in schedule.ranks]
    receives: list[list[list[Message]]] = [[[] for _ in slots] for slots in schedule.ranks]
    next_slot = [0] * len(schedule.ranks)
    for source, index in _slot_order(schedule):
        next_slot[source] = index + 1
        for message in outputs[source][index]:
            if message is not None and message.target != source:
                receives[message.target][next_slot[message.target]].append(message)
    return [
        [ScheduledSlot(slot, tuple(receive), sent) for slot, receive, sent in zip(*columns, strict=True)]
        for columns in zip(schedule.ranks, receives, outputs, strict=True)
    ]


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


def _slot_order(schedule: Schedule) -> list[tuple[int, int]]:
    """Return (rank, index) of every slot in the order in which slots end if each pass of a stage takes as long as any
    other. A receive is then posted before the slot in which its message is expected, so that it costs no time.
    """
    timeline = simulate(schedule).timeline
    ends = [
        (timed.end, rank, index) for rank, timed_slots in enumerate(timeline) for index, timed in enumerate(timed_slots)
    ]
    return [(rank, index) for _, rank, index in sorted(ends)]


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
