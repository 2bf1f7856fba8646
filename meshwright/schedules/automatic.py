"""Searches for a zero-bubble schedule for given costs and a memory limit (arXiv 2401.10241, section 3).

All ranks are simulated. A free rank prefers a backward pass that is ready, then a forward pass if its activations are
within the limit, and computes weights' gradients while it waits. The result depends on how many forward passes a rank
may run ahead, and on how short a wait it leaves empty. The search tries several values of both, and the handcrafted
schedules, and takes the best within the limit. Equal numbers give an equal schedule, so every rank gets the same one.

For any costs, a rank runs its forward passes in the order of micro-batches, and also its gradients of inputs and of
weights. Sums of gradients are therefore the same, bit by bit, in every schedule that the search can return.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from meshwright.api.parallelism import PipelineSchedule
from meshwright.schedules.actions import ActionKind, Schedule, Slot, check_counts, one
from meshwright.schedules.schedule import PipelineScheduleKind, PipelineShape, StageTimes
from meshwright.schedules.simulator import UNIT_COSTS, ActionCosts, simulate
from meshwright.schedules.zero_bubble import ZeroBubbleH1, zb_h1, zb_h2

WARMUP_FACTORS = (1.0, 1.25, 1.5, 1.75, 2.0)
PATIENCE = (0.0, 0.5, 1.0)
MIN_TRIES, ACTION_BUDGET = len(WARMUP_FACTORS), 100_000
"""How much is tried: every rank searches when it starts, and long pipelines take long to simulate. A number of tries,
not a time, so that all ranks try the same."""


def automatic(
    ranks: int,
    micro_batches: int,
    limit: int,
    costs: ActionCosts | Sequence[ActionCosts] = UNIT_COSTS,
    hop: float = 0.0,
) -> Schedule:
    """Search for the best schedule.

    Args:
        ranks: pipeline ranks, one stage each.
        micro_batches: number of micro-batches of one step.
        limit: largest number of micro-batches whose activations a rank may store.
        costs: of every stage, or one for each stage.
        hop: seconds to send to another rank.

    Raises:
        ValueError: `limit` is below 1, the number of costs differs from that of stages, or a cost is not a valid time.
    """
    check_counts(ranks, micro_batches)
    if limit < 1:
        raise ValueError(f"`limit` must allow at least one micro-batch, got {limit}")
    costs_by_stage = (costs,) * ranks if isinstance(costs, ActionCosts) else tuple(costs)
    if len(costs_by_stage) != ranks:
        raise ValueError(f"{len(costs_by_stage)} costs for {ranks} stages")
    seconds = [
        hop,
        *(duration for c in costs_by_stage for duration in (c.forward, c.backward_input, c.backward_weight)),
    ]
    if not all(math.isfinite(duration) and duration >= 0 for duration in seconds):
        raise ValueError(f"costs must be finite and at least 0, got {costs_by_stage} with a send of {hop}")
    return _search(ranks, micro_batches, limit, costs_by_stage, hop)


@lru_cache(maxsize=16)
def _search(ranks: int, micro_batches: int, limit: int, costs: tuple[ActionCosts, ...], hop: float) -> Schedule:
    heuristics = [
        *(_Heuristic(ahead, patience) for patience in PATIENCE for ahead in WARMUP_FACTORS),
        _Heuristic(float(ranks), 0.0),
    ]
    # The order for even costs is sometimes the better one for others too, by luck.
    attempts = [(heuristic, one) for one in dict.fromkeys([costs, (UNIT_COSTS,) * ranks]) for heuristic in heuristics]
    count = max(MIN_TRIES, ACTION_BUDGET // (ranks * micro_batches))
    searched = [_greedy(ranks, micro_batches, limit, heuristic, one, hop) for heuristic, one in attempts[:count]]
    handcrafted = [replace(make(ranks, micro_batches), name="automatic") for make in (zb_h1, zb_h2)]
    simulated = [(simulate(schedule, costs, hop), schedule) for schedule in dict.fromkeys(searched + handcrafted)]
    within_limit = [(result, schedule) for result, schedule in simulated if max(result.in_flight) <= limit]
    # Ranks meet at a step's end, where the gradient's norm is summed: what counts is when the last one is done.
    return min(within_limit, key=lambda pair: (pair[0].makespan, pair[0].longest))[1]


@dataclass(frozen=True, slots=True)
class _Heuristic:
    """How ranks choose."""

    ahead: float
    """Forward passes that a rank may be ahead of its backward passes, for each rank behind it."""
    patience: float
    """A rank waits for a pass that arrives within this part of a weights' gradient's time, rather than start one."""


def _greedy(
    ranks: int, micro_batches: int, limit: int, heuristic: _Heuristic, costs: tuple[ActionCosts, ...], hop: float
) -> Schedule:
    state = [_Rank(rank, min(limit, int(heuristic.ahead * (ranks - rank - 1)) + 1), limit) for rank in range(ranks)]
    arrivals: list[tuple[float, int, ActionKind, int]] = [(0.0, 0, ActionKind.FORWARD, m) for m in range(micro_batches)]
    wake_ups: list[tuple[float, int]] = [(0.0, 0)]
    heapq.heapify(arrivals)
    while wake_ups:
        now, rank = heapq.heappop(wake_ups)
        while arrivals and arrivals[0][0] <= now:
            _, target, kind, m = heapq.heappop(arrivals)
            state[target].ready[kind].append(m)
        one_rank = state[rank]
        if one_rank.free_at > now:
            continue
        chosen = one_rank.choose()
        if chosen is None:
            continue
        patience_until = now + heuristic.patience * costs[rank].backward_weight
        if chosen[0] is ActionKind.WEIGHT and one_rank.arrives_before(now, patience_until):
            # It is woken when that arrives.
            one_rank.postpone(chosen[1])
            continue
        kind, m = chosen
        end = now + costs[rank].of(kind)
        one_rank.start_action(kind, m, end)
        heapq.heappush(wake_ups, (end, rank))
        for target, next_kind in _enabled_by(kind, rank, ranks):
            arrival = end + (hop if target != rank else 0.0)
            heapq.heappush(arrivals, (arrival, target, next_kind, m))
            if next_kind is not ActionKind.WEIGHT:
                state[target].arriving.append((arrival, next_kind))
            heapq.heappush(wake_ups, (arrival, target))
    return Schedule("automatic", ranks, micro_batches, tuple(tuple(one_rank.slots) for one_rank in state))


def _enabled_by(kind: ActionKind, rank: int, ranks: int) -> list[tuple[int, ActionKind]]:
    """Actions that an action enables, as (rank, kind)."""
    if kind is ActionKind.FORWARD:
        return [(rank + 1, ActionKind.FORWARD)] if rank < ranks - 1 else [(rank, ActionKind.INPUT)]
    if kind is ActionKind.INPUT:
        return [(rank, ActionKind.WEIGHT), *([(rank - 1, ActionKind.INPUT)] if rank else [])]
    return []


class _Rank:
    """The actions that one rank can run now, and those that it has run."""

    def __init__(self, rank: int, first: int, limit: int) -> None:
        self.slots: list[Slot] = []
        self.ready: dict[ActionKind, deque[int]] = {kind: deque() for kind in ActionKind}
        self.arriving: deque[tuple[float, ActionKind]] = deque()
        """Passes whose results are under way: when they arrive, and what they let this rank do."""
        self.free_at = 0.0
        self._rank, self._first, self._limit = rank, first, limit
        self._in_flight = self._forwards = self._backwards = 0

    def choose(self) -> tuple[ActionKind, int] | None:
        """The next action, or None where the rank had better wait."""
        if self.ready[ActionKind.INPUT]:
            return ActionKind.INPUT, self.ready[ActionKind.INPUT].popleft()
        within_limit = self._in_flight < self._limit and self._forwards - self._backwards < self._first
        if self.ready[ActionKind.FORWARD] and within_limit:
            return ActionKind.FORWARD, self.ready[ActionKind.FORWARD].popleft()
        if self.ready[ActionKind.WEIGHT]:
            return ActionKind.WEIGHT, self.ready[ActionKind.WEIGHT].popleft()
        return None

    def arrives_before(self, now: float, until: float) -> bool:
        """Whether something that the rank would do at once arrives after `now` and before `until`."""
        self.arriving = deque(one for one in self.arriving if one[0] > now)
        may_forward = self._in_flight < self._limit and self._forwards - self._backwards < self._first
        return any(when < until and (kind is ActionKind.INPUT or may_forward) for when, kind in self.arriving)

    def postpone(self, micro_batch: int) -> None:
        """The rank does this weights' gradient later."""
        self.ready[ActionKind.WEIGHT].appendleft(micro_batch)

    def start_action(self, kind: ActionKind, micro_batch: int, end: float) -> None:
        """Does an action."""
        self.slots.append(one(kind, self._rank, micro_batch))
        self.free_at = end
        self._in_flight += (kind is ActionKind.FORWARD) - (kind is ActionKind.WEIGHT)
        self._forwards += kind is ActionKind.FORWARD
        self._backwards += kind is ActionKind.INPUT


class Automatic(PipelineScheduleKind):
    """The order that a search finds under a limit."""

    name = PipelineSchedule.AUTOMATIC
    short_name = "automatic"
    splits_backward = True
    measures_costs = True
    takes_activation_limit = True
    own_order = False
    searched = False

    def generate(self, shape: PipelineShape, costs: ActionCosts | Sequence[ActionCosts] = UNIT_COSTS) -> Schedule:
        """As `automatic`."""
        return automatic(shape.ranks, shape.micro_batches, shape.limit, costs)

    def generate_measured(self, shape: PipelineShape, costs: Sequence[ActionCosts], hop: float) -> Schedule:
        """Search with the time of a send too."""
        return automatic(shape.ranks, shape.micro_batches, shape.limit, costs, hop)

    def in_flight(self, shape: PipelineShape, rank: int) -> float:
        """Up to the limit."""
        return float(min(shape.micro_batches, shape.limit)) if shape.ranks > 1 else 1.0

    def _bubble(self, shape: PipelineShape, times: StageTimes) -> float:
        """The bubble if ranks synchronize at the end of a step, independent of the costs of single stages.

        With a limit of as many micro-batches as stages it is that of ZB-H1, and each further micro-batch fills the wait
        with one more gradient of weights. With a smaller limit a rank's micro-batches go to the last stage and back
        before others can start. The last stage always waits for the first forward passes. The formula is within 5% of
        a step of the search if the limit is at least `ranks`, and within 15% below that.
        """
        room = min(shape.limit, shape.micro_batches)
        round_trip = times.forward + times.backward_input
        minimum = (shape.ranks - 1) * times.forward
        if room >= shape.ranks:
            return max(minimum, ZeroBubbleH1().bubble(shape, times) - (room - shape.ranks) * times.backward_weight)
        fill_time = (room - 1) * max(round_trip - times.backward_weight, 0.0)
        return max(minimum, shape.micro_batches * (shape.ranks / room - 1) * round_trip + fill_time)
