"""Running a schedule on a clock: when every slot starts and ends, where ranks wait, how much they hold.

Ranks run their slots in order, each as soon as what it needs has arrived. A send between ranks takes `hop` seconds and
occupies neither. The result is exact for those assumptions, in time proportional to the number of actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.schedules.actions import ActionKind, Schedule, Slot
from meshwright.schedules.peak_memory import peak_memory
from meshwright.schedules.validate import dependencies


@dataclass(frozen=True, slots=True)
class ActionCosts:
    """Seconds of one stage's actions for one micro-batch."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0

    @property
    def total(self) -> float:
        """Seconds of a micro-batch's forward and backward pass."""
        return self.forward + self.backward_input + self.backward_weight

    def of(self, kind: ActionKind) -> float:
        """Seconds of one action."""
        if kind is ActionKind.FORWARD:
            return self.forward
        if kind is ActionKind.BACKWARD:
            return self.backward_input + self.backward_weight
        return self.backward_input if kind is ActionKind.INPUT else self.backward_weight


UNIT_COSTS = ActionCosts()
"""Every action takes as long: the schedules' own unit."""


@dataclass(frozen=True, slots=True)
class TimedSlot:
    """One slot on the clock."""

    slot: Slot
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """The timeline of a schedule."""

    timeline: tuple[tuple[TimedSlot, ...], ...]
    """Each rank's slots in order."""
    in_flight: tuple[int, ...]
    """The most micro-batches of each rank, over all its stages, whose weight gradients are not complete.
    `peak_memory` has their bytes."""

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end over all ranks."""
        return max(timed_slots[-1].end for timed_slots in self.timeline)

    @property
    def longest(self) -> float:
        """Seconds of the rank that takes longest, from its first start to its last end.

        The time per step if ranks do not synchronize at its end (arXiv 2401.10241, section 4).
        """
        return max(timed_slots[-1].end - timed_slots[0].start for timed_slots in self.timeline)

    def busy(self, rank: int) -> float:
        """Seconds in which a rank computes."""
        return sum(timed_slots.end - timed_slots.start for timed_slots in self.timeline[rank])

    @property
    def bubble(self) -> float:
        """Part of the makespan in which ranks wait, on average."""
        ranks = range(len(self.timeline))
        return 1.0 - sum(self.busy(rank) for rank in ranks) / (len(self.timeline) * self.makespan)


def simulate(
    schedule: Schedule, costs: ActionCosts | Sequence[ActionCosts] = UNIT_COSTS, hop: float = 0.0, overlap: float = 0.0
) -> Simulation:
    """Runs a schedule.

    Args:
        schedule: a valid one.
        costs: of every stage, or one for each stage of the model.
        hop: seconds to send to another rank.
        overlap: part of the shorter action of an overlapped pair that disappears behind the longer one.

    Raises:
        ValueError: ranks wait for each other for ever, or there are not as many costs as stages.
    """
    costs_by_stage = [costs] * schedule.stages if isinstance(costs, ActionCosts) else list(costs)
    if len(costs_by_stage) != schedule.stages:
        raise ValueError(f"{len(costs_by_stage)} costs for {schedule.stages} stages")
    run = _Clock(schedule, costs_by_stage, hop, overlap)
    run.all()
    return Simulation(
        tuple(tuple(timed_slots) for timed_slots in run.timeline), tuple(int(peak) for peak in peak_memory(schedule))
    )


class _Clock:
    def __init__(self, schedule: Schedule, costs: list[ActionCosts], hop: float, overlap: float) -> None:
        self.timeline: list[list[TimedSlot]] = [[] for _ in schedule.ranks]
        self._schedule, self._costs, self._hop, self._overlap = schedule, costs, hop, overlap
        self._ended: dict[tuple[ActionKind, int, int], tuple[float, int]] = {}
        self._waiting: dict[tuple[int, int], list[int]] = {}

    def all(self) -> None:
        """Runs every rank as far as it comes, then those that its actions set free."""
        queue = list(range(len(self._schedule.ranks)))
        while queue:
            queue.extend(self._advance(queue.pop()))
        deadlocked = [
            r for r, timed_slots in enumerate(self.timeline) if len(timed_slots) < len(self._schedule.ranks[r])
        ]
        if deadlocked:
            raise ValueError(f"ranks {deadlocked} of schedule `{self._schedule.name}` wait for each other for ever")

    def _advance(self, rank: int) -> list[int]:
        slots, timed_slots, unblocked = self._schedule.ranks[rank], self.timeline[rank], []
        while len(timed_slots) < len(slots):
            slot = slots[len(timed_slots)]
            start = self._start(slot, rank)
            if start is None:
                break
            end = start + self._seconds(slot)
            timed_slots.append(TimedSlot(slot, start, end))
            for action in slot:
                self._ended[action.kind, action.stage, action.micro_batch] = (end, rank)
                unblocked += self._waiting.pop((action.stage, action.micro_batch), [])
        return unblocked

    def _start(self, slot: Slot, rank: int) -> float | None:
        """When a rank's next slot can start; None, and a note who waits for what, when that is not known yet."""
        start = self.timeline[rank][-1].end if self.timeline[rank] else 0.0
        for action in slot:
            for kinds, stage, micro_batch in dependencies(action, self._schedule.stages):
                end_and_rank = self._end_of(kinds, stage, micro_batch)
                if end_and_rank is None:
                    self._waiting.setdefault((stage, micro_batch), []).append(rank)
                    return None
                end, rank_of_action = end_and_rank
                start = max(start, end + (self._hop if rank_of_action != rank else 0.0))
        return start

    def _end_of(self, kinds: tuple[ActionKind, ...], stage: int, micro_batch: int) -> tuple[float, int] | None:
        """(when, on which rank) one of `kinds` ended."""
        for kind in kinds:
            end_and_rank = self._ended.get((kind, stage, micro_batch))
            if end_and_rank is not None:
                return end_and_rank
        return None

    def _seconds(self, slot: Slot) -> float:
        action_seconds = [self._costs[action.stage].of(action.kind) for action in slot]
        return sum(action_seconds) - (self._overlap * min(action_seconds) if len(action_seconds) > 1 else 0.0)
