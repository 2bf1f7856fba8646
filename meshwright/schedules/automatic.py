"""A zero-bubble schedule found for given costs and a memory limit (arXiv 2401.10241, section 3).

Ranks are simulated together. A rank that is free prefers a backward pass that is ready, then a forward pass while its
activations are within the limit, and fills the time until the next one arrives with weights' gradients. How many
forward passes each rank may run ahead is what the quality hangs on, so several caps are tried, beside the handcrafted
schedules, and the best within the limit is kept.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import replace

from meshwright.schedules.actions import Kind, Schedule, Slot, check_counts, one
from meshwright.schedules.simulate import EVEN, Costs, simulate
from meshwright.schedules.zero_bubble import zb_h1, zb_h2


def automatic(ranks: int, micro_batches: int, limit: int, costs: Costs = EVEN, hop: float = 0.0) -> Schedule:
    """The best schedule found.

    Args:
        ranks: pipeline ranks, one stage each.
        micro_batches: of one step.
        limit: most micro-batches whose activations a rank may hold.
        costs: of every stage.
        hop: seconds to send to another rank.

    Raises:
        ValueError: `limit` is below 1.
    """
    check_counts(ranks, micro_batches)
    if limit < 1:
        raise ValueError(f"`limit` must allow at least one micro-batch, not {limit}")
    tried = [_greedy(ranks, micro_batches, limit, ahead, costs, hop) for ahead in (1.0, 1.5, 2.0, float(ranks))]
    known = [replace(make(ranks, micro_batches), name="automatic") for make in (zb_h1, zb_h2)]
    run = [(simulate(schedule, costs, hop), schedule) for schedule in tried + known]
    within = [(result, schedule) for result, schedule in run if max(result.in_flight) <= limit]
    return min(within, key=lambda pair: (pair[0].longest, pair[0].makespan))[1]


def _greedy(ranks: int, micro_batches: int, limit: int, ahead: float, costs: Costs, hop: float) -> Schedule:
    state = [_Rank(rank, min(limit, int(ahead * (ranks - rank - 1)) + 1), limit) for rank in range(ranks)]
    arrivals: list[tuple[float, int, Kind, int]] = [(0.0, 0, Kind.FORWARD, m) for m in range(micro_batches)]
    wakes: list[tuple[float, int]] = [(0.0, 0)]
    heapq.heapify(arrivals)
    while wakes:
        now, rank = heapq.heappop(wakes)
        while arrivals and arrivals[0][0] <= now:
            _, target, kind, m = heapq.heappop(arrivals)
            state[target].ready[kind].append(m)
        one_rank = state[rank]
        if one_rank.free_at > now:
            continue
        chosen = one_rank.choose()
        if chosen is None:
            continue
        kind, m = chosen
        end = now + costs.of(kind)
        one_rank.take(kind, m, end)
        heapq.heappush(wakes, (end, rank))
        for target, next_kind in _follows(kind, rank, ranks):
            arrives = end + (hop if target != rank else 0.0)
            heapq.heappush(arrivals, (arrives, target, next_kind, m))
            heapq.heappush(wakes, (arrives, target))
    return Schedule("automatic", ranks, micro_batches, tuple(tuple(one_rank.slots) for one_rank in state))


def _follows(kind: Kind, rank: int, ranks: int) -> list[tuple[int, Kind]]:
    """What an action makes possible: (rank, kind)."""
    if kind is Kind.FORWARD:
        return [(rank + 1, Kind.FORWARD)] if rank < ranks - 1 else [(rank, Kind.INPUT)]
    if kind is Kind.INPUT:
        return [(rank, Kind.WEIGHT), *([(rank - 1, Kind.INPUT)] if rank else [])]
    return []


class _Rank:
    """What one rank could do now, and what it has done."""

    def __init__(self, rank: int, first: int, limit: int) -> None:
        self.slots: list[Slot] = []
        self.ready: dict[Kind, deque[int]] = {kind: deque() for kind in Kind}
        self.free_at = 0.0
        self._rank, self._first, self._limit = rank, first, limit
        self._held = self._forwards = self._backwards = 0

    def choose(self) -> tuple[Kind, int] | None:
        """The next action, or None where the rank had better wait."""
        if self.ready[Kind.INPUT]:
            return Kind.INPUT, self.ready[Kind.INPUT].popleft()
        within = self._held < self._limit and self._forwards - self._backwards < self._first
        if self.ready[Kind.FORWARD] and within:
            return Kind.FORWARD, self.ready[Kind.FORWARD].popleft()
        if self.ready[Kind.WEIGHT]:
            return Kind.WEIGHT, self.ready[Kind.WEIGHT].popleft()
        return None

    def take(self, kind: Kind, micro_batch: int, end: float) -> None:
        """Does an action."""
        self.slots.append(one(kind, self._rank, micro_batch))
        self.free_at = end
        self._held += (kind is Kind.FORWARD) - (kind is Kind.WEIGHT)
        self._forwards += kind is Kind.FORWARD
        self._backwards += kind is Kind.INPUT
