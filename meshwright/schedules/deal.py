"""Layers of stages of which a rank holds several: the slowest stage as fast as can be, and then the slowest rank.

Stages that are each as equal as can be do not do: a rank may hold the larger one of two pairs, and all its stages
together set the pace. So layers are moved between stages as long as that makes the slowest rank faster and no stage
slower than the slowest has to be; then a search through all splits that could be faster still, the others cut off early
(Land and Doig, Econometrica 28, 1960), goes on for a bounded number of steps. A number of steps, not a time: every rank
and the planner come to the same split.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from meshwright.schedules.split import balanced

_MOST_STEPS = 4000
"""Enough for every split of a dozen layers, and a few hundredths of a second."""
_MOST_MOVES = 50_000
"""Of layers between stages that are weighed."""
_MOST_STAGES = 128
"""What is searched through, a level a stage."""


def dealt(costs: Sequence[float], homes: Sequence[int], first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Layers of each stage so that the slowest stage is as fast as can be, and then the slowest rank.

    Every stage has at least one. For the ranks a split may be missed where layers are many, see `_MOST_STEPS`.

    Args:
        costs: of each layer, in order; any unit.
        homes: the rank of each stage, 0, 1, ..., in the model's order.
        first: cost of what the first stage does beside its layers.
        last: cost of what the last stage does beside its layers.

    Raises:
        ValueError: there are more stages than layers, or a cost is negative.
    """
    start = balanced(costs, len(homes), first, last)
    if len(set(homes)) == len(homes):
        return start
    problem = _Problem(tuple(costs), tuple(homes), first, last)
    most = max(problem.stages(start))
    split = _descended(problem, start, most)
    found = _Search(problem, most).below(max(problem.ranks(problem.stages(split))))
    return tuple(split if found is None else _descended(problem, found, most))


@dataclass(frozen=True, slots=True)
class _Problem:
    """The arguments of `dealt`."""

    costs: tuple[float, ...]
    homes: tuple[int, ...]
    first: float
    last: float

    @property
    def total(self) -> float:
        """All costs."""
        return sum(self.costs) + self.first + self.last

    @property
    def slack(self) -> float:
        """Smaller differences are rounding's."""
        return 1e-9 * self.total

    def stages(self, split: Sequence[int]) -> list[float]:
        """The cost of each stage."""
        costs = [sum(self.costs[begin:end]) for begin, end in pairwise([0, *accumulate(split)])]
        costs[0] += self.first
        costs[-1] += self.last
        return costs

    def ranks(self, stages: Sequence[float]) -> list[float]:
        """The cost of each rank, all its stages together."""
        costs = [0.0] * (max(self.homes) + 1)
        for home, cost in zip(self.homes, stages, strict=True):
            costs[home] += cost
        return costs


def _descended(problem: _Problem, split: Sequence[int], most: float) -> list[int]:
    """From one split to a better one as long as there is one a move away whose stages cost at most `most`.

    What counts is first the slowest rank, then how uneven ranks are, then stages.
    """
    now, total, slack = list(split), problem.total or 1.0, problem.slack
    unit = slack or 1.0

    def key(ranks: Sequence[float], stages: Sequence[float]) -> tuple[int, int, int]:
        unevenness = (sum(cost * cost for cost in each) / total for each in (ranks, stages))
        slowest, of_ranks, of_stages = (round(cost / unit) for cost in (max(ranks), *unevenness))
        return slowest, of_ranks, of_stages

    stages = problem.stages(now)
    best = key(problem.ranks(stages), stages)
    for _ in range(1 + _MOST_MOVES // len(now) ** 2):
        chosen = None
        for giver, taker, ranks, stages in _moves(problem, now):
            if max(ranks) > (best[0] + 1) * unit or max(stages) > most + slack:
                continue
            if (reached := key(ranks, stages)) < best:
                best, chosen = reached, (giver, taker)
        if chosen is None:
            break
        now[chosen[0]] -= 1
        now[chosen[1]] += 1
    return now


def _moves(problem: _Problem, split: Sequence[int]) -> Iterator[tuple[int, int, list[float], list[float]]]:
    """(stage that gives a layer, stage that takes one, costs of ranks then, of stages).

    Those between pass one on. The lists are changed afterwards.
    """
    bounds, before = [0, *accumulate(split)], problem.stages(split)
    for giver, layers in enumerate(split):
        if layers == 1:
            continue
        for step in (1, -1):
            stages, ranks = list(before), problem.ranks(before)
            taker = giver + step
            while 0 <= taker < len(stages):
                cost = problem.costs[bounds[taker] - 1 if step == 1 else bounds[taker + 1]]
                for stage, change in ((taker - step, -cost), (taker, cost)):
                    stages[stage] += change
                    ranks[problem.homes[stage]] += change
                yield giver, taker, ranks, stages
                taker += step


class _Search:
    """Through the splits whose slowest rank is faster than a limit, stage by stage, each near its part first."""

    def __init__(self, problem: _Problem, most: float) -> None:
        self._homes, self._slack, self._most = problem.homes, problem.slack, most + problem.slack
        self._total = problem.total
        self._summed = [0.0, *accumulate(problem.costs)]
        self._beside = [0.0] * len(self._homes)
        self._beside[0] += problem.first
        self._beside[-1] += problem.last
        self._final = {home: stage for stage, home in enumerate(self._homes)}
        """Of each rank, its last stage."""
        self._ranks = [0.0] * (max(self._homes) + 1)
        self._ends: list[int] = []
        self._limit = 0.0
        self._steps = 0
        self._found: list[int] | None = None

    def below(self, limit: float) -> list[int] | None:
        """The best split found whose slowest rank costs less than `limit`; None where none was found."""
        self._limit = limit
        if len(self._homes) <= _MOST_STAGES:
            self._go(0, len(self._ranks), self._total)
        return self._found

    def _go(self, begin: int, unfinished: int, left: float) -> None:
        """Try the ends of the next stage. `left` is what the `unfinished` ranks have to do, all in all."""
        self._steps += 1
        stage, home = len(self._ends), self._homes[len(self._ends)]
        for end in self._near(stage, begin):
            cost = self._summed[end] - self._summed[begin] + self._beside[stage]
            rank = self._ranks[home] + cost
            if self._steps > _MOST_STEPS or cost > self._most or rank >= self._limit - self._slack:
                continue
            ends_rank = self._final[home] == stage
            rest, ranks = (left - rank, unfinished - 1) if ends_rank else (left, unfinished)
            if rest > ranks * self._limit + self._slack:
                continue
            before, self._ranks[home] = self._ranks[home], rank
            self._ends.append(end)
            if stage == len(self._homes) - 1:
                self._limit = max(self._ranks)
                self._found = [end - begin for begin, end in pairwise([0, *self._ends])]
            else:
                self._go(end, ranks, rest)
            self._ends.pop()
            self._ranks[home] = before

    def _near(self, stage: int, begin: int) -> list[int]:
        """Where a stage from `begin` may end within the limit, nearest first to its part of what is left."""
        later, layers = len(self._homes) - stage - 1, len(self._summed) - 1
        if not later:
            return [layers]
        room = min(self._most, self._limit - self._ranks[self._homes[stage]]) - self._beside[stage]
        furthest = min(bisect_right(self._summed, self._summed[begin] + room), layers - later + 1)
        goal = (self._summed[-1] - self._summed[begin]) / (later + 1) + self._summed[begin]
        return sorted(range(begin + 1, furthest), key=lambda end: abs(self._summed[end] - goal))
