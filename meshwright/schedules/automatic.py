"""A zero-bubble schedule found for given costs and a memory limit (arXiv 2401.10241, section 3).

Ranks are simulated together. A rank that is free prefers a backward pass that is ready, then a forward pass while its
activations are within the limit, and fills the time until the next one arrives with weights' gradients. How many
forward passes each rank may run ahead, and how short a wait it leaves empty, is what the quality hangs on: several of
both are tried, beside the handcrafted schedules, and the best within the limit is kept. Equal numbers give an equal
schedule, so every rank finds the same one by itself.

Whatever the costs, a rank runs its forward passes in the order of micro-batches, and so its gradients of inputs and
those of weights: sums of gradients are the same, bit by bit, in every schedule that can be found.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from meshwright.schedules.actions import Kind, Schedule, Slot, check_counts, one
from meshwright.schedules.simulate import EVEN, Costs, simulate
from meshwright.schedules.zero_bubble import zb_h1, zb_h2

AHEAD = (1.0, 1.25, 1.5, 1.75, 2.0)
PATIENCE = (0.0, 0.5, 1.0)
LEAST, MOST_ACTIONS = len(AHEAD), 100_000
"""How much is tried: every rank searches when it starts, and long pipelines take long to simulate. A number of tries,
not a time, so that all ranks try the same."""


def automatic(
    ranks: int, micro_batches: int, limit: int, costs: Costs | Sequence[Costs] = EVEN, hop: float = 0.0
) -> Schedule:
    """The best schedule found.

    Args:
        ranks: pipeline ranks, one stage each.
        micro_batches: of one step.
        limit: most micro-batches whose activations a rank may hold.
        costs: of every stage alike, or one for each stage.
        hop: seconds to send to another rank.

    Raises:
        ValueError: `limit` is below 1, there are not as many costs as stages, or one is no length of time.
    """
    check_counts(ranks, micro_batches)
    if limit < 1:
        raise ValueError(f"`limit` must allow at least one micro-batch, not {limit}")
    every = (costs,) * ranks if isinstance(costs, Costs) else tuple(costs)
    if len(every) != ranks:
        raise ValueError(f"{len(every)} costs for {ranks} stages")
    seconds = [hop, *(each for c in every for each in (c.forward, c.backward_input, c.backward_weight))]
    if not all(math.isfinite(each) and each >= 0 for each in seconds):
        raise ValueError(f"costs must be finite and at least 0, not {every} with a send of {hop}")
    return _search(ranks, micro_batches, limit, every, hop)


@lru_cache(maxsize=16)
def _search(ranks: int, micro_batches: int, limit: int, costs: tuple[Costs, ...], hop: float) -> Schedule:
    ways = [*(_Way(ahead, patience) for patience in PATIENCE for ahead in AHEAD), _Way(float(ranks), 0.0)]
    # The order for even costs is sometimes the better one for others too, by luck.
    tries = [(way, one) for one in dict.fromkeys([costs, (EVEN,) * ranks]) for way in ways]
    count = max(LEAST, MOST_ACTIONS // (ranks * micro_batches))
    tried = [_greedy(ranks, micro_batches, limit, way, one, hop) for way, one in tries[:count]]
    known = [replace(make(ranks, micro_batches), name="automatic") for make in (zb_h1, zb_h2)]
    run = [(simulate(schedule, costs, hop), schedule) for schedule in dict.fromkeys(tried + known)]
    within = [(result, schedule) for result, schedule in run if max(result.in_flight) <= limit]
    # Ranks meet at a step's end, where the gradient's norm is summed: what counts is when the last one is done.
    return min(within, key=lambda pair: (pair[0].makespan, pair[0].longest))[1]


@dataclass(frozen=True, slots=True)
class _Way:
    """How ranks choose."""

    ahead: float
    """Forward passes that a rank may be ahead of its backward passes, for each rank behind it."""
    patience: float
    """A rank waits for a pass that arrives within this part of a weights' gradient's time, rather than start one."""


def _greedy(ranks: int, micro_batches: int, limit: int, way: _Way, costs: tuple[Costs, ...], hop: float) -> Schedule:
    state = [_Rank(rank, min(limit, int(way.ahead * (ranks - rank - 1)) + 1), limit) for rank in range(ranks)]
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
        soon = now + way.patience * costs[rank].backward_weight
        if chosen[0] is Kind.WEIGHT and one_rank.expects(now, soon):
            # It is woken when that arrives.
            one_rank.put_back(chosen[1])
            continue
        kind, m = chosen
        end = now + costs[rank].of(kind)
        one_rank.take(kind, m, end)
        heapq.heappush(wakes, (end, rank))
        for target, next_kind in _follows(kind, rank, ranks):
            arrives = end + (hop if target != rank else 0.0)
            heapq.heappush(arrivals, (arrives, target, next_kind, m))
            if next_kind is not Kind.WEIGHT:
                state[target].coming.append((arrives, next_kind))
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
        self.coming: deque[tuple[float, Kind]] = deque()
        """Passes whose results are under way: when they arrive, and what they let this rank do."""
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

    def expects(self, now: float, until: float) -> bool:
        """Whether something that the rank would do at once arrives after `now` and before `until`."""
        self.coming = deque(one for one in self.coming if one[0] > now)
        room = self._held < self._limit and self._forwards - self._backwards < self._first
        return any(when < until and (kind is Kind.INPUT or room) for when, kind in self.coming)

    def put_back(self, micro_batch: int) -> None:
        """The rank does this weights' gradient later."""
        self.ready[Kind.WEIGHT].appendleft(micro_batch)

    def take(self, kind: Kind, micro_batch: int, end: float) -> None:
        """Does an action."""
        self.slots.append(one(kind, self._rank, micro_batch))
        self.free_at = end
        self._held += (kind is Kind.FORWARD) - (kind is Kind.WEIGHT)
        self._forwards += kind is Kind.FORWARD
        self._backwards += kind is Kind.INPUT
