"""Splits layers over stages if a rank has several stages. Minimizes the slowest stage, and then the slowest rank.

Balancing the stages is not enough: all stages of a rank together set its pace, and one rank may have the larger stage
of each pair. Layers are therefore moved between stages as long as that makes the slowest rank faster and no stage
slower than the slowest must be. Then a branch-and-bound search (Land and Doig, Econometrica 28, 1960) looks for faster
splits. It is limited by a number of steps, not by time, so that every rank and the planner get the same split.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from meshwright.schedules.partition import partition_layers

_MAX_STEPS = 4000
"""Enough for every split of a dozen layers. Takes a few hundredths of a second."""
_MAX_MOVES = 50_000
"""Largest number of moves of layers between stages that are compared."""
_MAX_STAGES = 128
"""Largest number of stages that is searched, because the search has one level per stage."""


def partition_over_ranks(
    costs: Sequence[float], homes: Sequence[int], first: float = 0.0, last: float = 0.0
) -> tuple[int, ...]:
    """Number of layers of each stage that minimizes the slowest stage, and then the slowest rank.

    Every stage has at least one layer. With many layers the search may miss the best split, see `_MAX_STEPS`.

    Args:
        costs: cost of each layer, in order, in any unit.
        homes: the rank of each stage, 0, 1, ..., in the model's order.
        first: cost of what the first stage does in addition to its layers.
        last: cost of what the last stage does in addition to its layers.

    Raises:
        ValueError: there are more stages than layers, or a cost is negative.
    """
    start = partition_layers(costs, len(homes), first, last)
    if len(set(homes)) == len(homes):
        return start
    problem = _PartitionProblem(tuple(costs), tuple(homes), first, last)
    stage_limit = max(problem.stages(start))
    split = _descend(problem, start, stage_limit)
    searched = _BranchAndBound(problem, stage_limit).below(max(problem.ranks(problem.stages(split))))
    return tuple(split if searched is None else _descend(problem, searched, stage_limit))


@dataclass(frozen=True, slots=True)
class _PartitionProblem:
    """The arguments of `partition_over_ranks`."""

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


def _descend(problem: _PartitionProblem, split: Sequence[int], stage_limit: float) -> list[int]:
    """From one split to a better one as long as there is one a move away whose stages cost at most `stage_limit`.

    What counts is first the slowest rank, then how uneven ranks are, then stages.
    """
    current_split, total, slack = list(split), problem.total or 1.0, problem.slack
    unit = slack or 1.0

    def key(ranks: Sequence[float], stages: Sequence[float]) -> tuple[int, int, int]:
        unevenness = (sum(cost * cost for cost in each) / total for each in (ranks, stages))
        slowest, of_ranks, of_stages = (round(cost / unit) for cost in (max(ranks), *unevenness))
        return slowest, of_ranks, of_stages

    stages = problem.stages(current_split)
    best = key(problem.ranks(stages), stages)
    for _ in range(1 + _MAX_MOVES // len(current_split) ** 2):
        chosen = None
        for from_stage, to_stage, ranks, stages in _moves(problem, current_split):
            if max(ranks) > (best[0] + 1) * unit or max(stages) > stage_limit + slack:
                continue
            if (score := key(ranks, stages)) < best:
                best, chosen = score, (from_stage, to_stage)
        if chosen is None:
            break
        current_split[chosen[0]] -= 1
        current_split[chosen[1]] += 1
    return current_split


def _moves(problem: _PartitionProblem, split: Sequence[int]) -> Iterator[tuple[int, int, list[float], list[float]]]:
    """(stage that gives a layer, stage that takes one, costs of ranks then, of stages).

    Those between pass one on. The lists are changed afterwards.
    """
    bounds, before = [0, *accumulate(split)], problem.stages(split)
    for from_stage, layers in enumerate(split):
        if layers == 1:
            continue
        for step in (1, -1):
            stages, ranks = list(before), problem.ranks(before)
            to_stage = from_stage + step
            while 0 <= to_stage < len(stages):
                cost = problem.costs[bounds[to_stage] - 1 if step == 1 else bounds[to_stage + 1]]
                for stage, change in ((to_stage - step, -cost), (to_stage, cost)):
                    stages[stage] += change
                    ranks[problem.homes[stage]] += change
                yield from_stage, to_stage, ranks, stages
                to_stage += step


class _BranchAndBound:
    """Searches the splits whose slowest rank is faster than a limit, stage by stage, starting near the even split."""

    def __init__(self, problem: _PartitionProblem, stage_limit: float) -> None:
        self._homes, self._slack, self._stage_limit = problem.homes, problem.slack, stage_limit + problem.slack
        self._total = problem.total
        self._summed = [0.0, *accumulate(problem.costs)]
        self._extra_costs = [0.0] * len(self._homes)
        self._extra_costs[0] += problem.first
        self._extra_costs[-1] += problem.last
        self._last_stage_of_rank = {home: stage for stage, home in enumerate(self._homes)}
        """Of each rank, its last stage."""
        self._ranks = [0.0] * (max(self._homes) + 1)
        self._ends: list[int] = []
        self._limit = 0.0
        self._steps = 0
        self._found: list[int] | None = None

    def below(self, limit: float) -> list[int] | None:
        """The best split found whose slowest rank costs less than `limit`; None where none was found."""
        self._limit = limit
        if len(self._homes) <= _MAX_STAGES:
            self._branch(0, len(self._ranks), self._total)
        return self._found

    def _branch(self, begin: int, unfinished: int, left: float) -> None:
        """Try the ends of the next stage. `left` is the total work of the `unfinished` ranks."""
        self._steps += 1
        stage, home = len(self._ends), self._homes[len(self._ends)]
        for end in self._ends_nearest_share(stage, begin):
            cost = self._summed[end] - self._summed[begin] + self._extra_costs[stage]
            rank = self._ranks[home] + cost
            if self._steps > _MAX_STEPS or cost > self._stage_limit or rank >= self._limit - self._slack:
                continue
            ends_rank = self._last_stage_of_rank[home] == stage
            rest, ranks = (left - rank, unfinished - 1) if ends_rank else (left, unfinished)
            if rest > ranks * self._limit + self._slack:
                continue
            before, self._ranks[home] = self._ranks[home], rank
            self._ends.append(end)
            if stage == len(self._homes) - 1:
                self._limit = max(self._ranks)
                self._found = [end - begin for begin, end in pairwise([0, *self._ends])]
            else:
                self._branch(end, ranks, rest)
            self._ends.pop()
            self._ranks[home] = before

    def _ends_nearest_share(self, stage: int, begin: int) -> list[int]:
        """Possible ends of a stage from `begin` within the limit, the closest to its share of the rest first."""
        later, layers = len(self._homes) - stage - 1, len(self._summed) - 1
        if not later:
            return [layers]
        cost_left = min(self._stage_limit, self._limit - self._ranks[self._homes[stage]]) - self._extra_costs[stage]
        last_end = min(bisect_right(self._summed, self._summed[begin] + cost_left), layers - later + 1)
        target = (self._summed[-1] - self._summed[begin]) / (later + 1) + self._summed[begin]
        return sorted(range(begin + 1, last_end), key=lambda end: abs(self._summed[end] - target))
