"""Transfers as NCCL runs them: kernels that occupy their device until both ends are there, and waits for the device.

A host enqueues passes, receives and sends, and waits for none of them. A pass runs after the passes before it and after
the messages that it uses. A receive or a send starts after the passes that were enqueued before it and after the
transfers before it in its channel, and ends when its other end has started too. Where a host waits for its device, it
goes on only when everything that it has enqueued has ended: so the first launch of a kernel, the creation of a
communicator and the release of memory do.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What a host does."""

    RECEIVE = "receive"
    WAIT = "wait"
    PASS = "pass"
    SEND = "send"


class Event(NamedTuple):
    """One act of a host."""

    kind: Kind
    peer: int = -1
    """The other rank of a receive, of a wait for one, or of a send."""
    name: str = ""
    """The message, or the passes of a slot."""

    def __str__(self) -> str:
        return f"{self.kind.value} {self.name}" + (f" of rank {self.peer}" if self.peer >= 0 else "")


Waits = Callable[[int, int], bool]
"""Whether a rank waits for its device before an event, by its index."""


@dataclass
class _Operation:
    """A kernel on a rank's device."""

    after: list[_Operation]
    meets: _Operation | None = None
    transfer: bool = False
    done: bool = False

    def startable(self) -> bool:
        return all(operation.done for operation in self.after)

    def try_to_end(self) -> bool:
        if self.done or not self.startable() or (self.transfer and (self.meets is None or not self.meets.startable())):
            return False
        self.done = True
        if self.meets is not None:
            self.meets.done = True
        return True


@dataclass
class _Rank:
    events: Sequence[Event]
    position: int = 0
    operations: list[_Operation] = field(default_factory=list)
    last_pass: list[_Operation] = field(default_factory=list)
    channels: dict[tuple[int, bool], list[_Operation]] = field(default_factory=dict)
    """Transfers by peer and direction of the message: to higher ranks, or to lower ones."""
    receives: dict[tuple[int, str], _Operation] = field(default_factory=dict)
    used: list[_Operation] = field(default_factory=list)


def stuck_ranks(programs: Sequence[Sequence[Event]], waits: Waits) -> list[str]:
    """Run the programs, and return where ranks wait forever; empty if every program ends."""
    ranks = [_Rank(events) for events in programs]
    progress = True
    while progress:
        progress = False
        for number, rank in enumerate(ranks):
            while rank.position < len(rank.events):
                if waits(number, rank.position) and not all(operation.done for operation in rank.operations):
                    break
                _enqueue(ranks, number, rank.events[rank.position])
                rank.position += 1
                progress = True
        for rank in ranks:
            for operation in rank.operations:
                progress = operation.try_to_end() or progress
            rank.operations = [operation for operation in rank.operations if not operation.done]
    return [
        f"rank {number} before event {rank.position} of {len(rank.events)}"
        for number, rank in enumerate(ranks)
        if rank.position < len(rank.events) or rank.operations
    ]


def _enqueue(ranks: list[_Rank], number: int, event: Event) -> None:
    rank = ranks[number]
    if event.kind is Kind.WAIT:
        rank.used.append(rank.receives.pop((event.peer, event.name)))
        return
    operation = _Operation([*rank.last_pass])
    rank.operations.append(operation)
    if event.kind is Kind.PASS:
        operation.after += rank.used
        rank.used, rank.last_pass = [], [operation]
        return
    operation.transfer = True
    upward = (event.peer > number) == (event.kind is Kind.SEND)
    own = rank.channels.setdefault((event.peer, upward), [])
    theirs = ranks[event.peer].channels.setdefault((number, upward), [])
    operation.after += own[-1:]
    own.append(operation)
    if len(theirs) >= len(own):
        operation.meets, theirs[len(own) - 1].meets = theirs[len(own) - 1], operation
    if event.kind is Kind.RECEIVE:
        rank.receives[event.peer, event.name] = operation


def everywhere(rank: int, index: int) -> bool:
    """Wait for the device before every event: no other choice of waits can be worse, because each only adds one."""
    return True


def first_uses(programs: Sequence[Sequence[Event]]) -> Waits:
    """Wait before the first pass of each kind on a rank, whose kernels are loaded or compiled then, and before the
    first transfer with each peer in each direction, whose communicator is created then.
    """
    firsts: list[set[int]] = []
    for events in programs:
        seen: set[object] = set()
        indices = set()
        for index, event in enumerate(events):
            used = event.name[0] if event.kind is Kind.PASS else (event.kind, event.peer)
            if event.kind is not Kind.WAIT and used not in seen:
                seen.add(used)
                indices.add(index)
        firsts.append(indices)
    return lambda rank, index: index in firsts[rank]


def only(places: Collection[tuple[int, int]]) -> Waits:
    """Wait at these (rank, index of an event)."""
    return lambda rank, index: (rank, index) in places


def blocked_hosts(programs: Sequence[Sequence[Event]]) -> list[str]:
    """Run the programs with `everywhere` in time proportional to their length: each transfer blocks both hosts."""
    positions, ready = [0] * len(programs), deque(range(len(programs)))
    while ready:
        number = ready.popleft()
        events = programs[number]
        while positions[number] < len(events):
            event = events[positions[number]]
            if event.kind in (Kind.RECEIVE, Kind.SEND):
                peer = programs[event.peer]
                other = peer[positions[event.peer]] if positions[event.peer] < len(peer) else None
                opposite = Kind.SEND if event.kind is Kind.RECEIVE else Kind.RECEIVE
                if other is None or (other.kind, other.peer, other.name) != (opposite, number, event.name):
                    break
                positions[event.peer] += 1
                ready.append(event.peer)
            positions[number] += 1
    return [
        f"rank {number} at {events[position]}"
        for number, (position, events) in enumerate(zip(positions, programs, strict=True))
        if position < len(events)
    ]


def mismatches(programs: Sequence[Sequence[Event]]) -> dict[tuple[int, int], tuple[list[str], list[str]]]:
    """The channels, as (source, target), in which messages are not received in the order in which they are sent."""
    sent: dict[tuple[int, int], list[str]] = defaultdict(list)
    received: dict[tuple[int, int], list[str]] = defaultdict(list)
    for own, events in enumerate(programs):
        for event in events:
            if event.kind is Kind.SEND:
                sent[own, event.peer].append(event.name)
            elif event.kind is Kind.RECEIVE:
                received[event.peer, own].append(event.name)
    channels = sorted({*sent, *received})
    return {channel: (sent[channel], received[channel]) for channel in channels if sent[channel] != received[channel]}
