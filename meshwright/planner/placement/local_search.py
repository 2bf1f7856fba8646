"""Searches placements: constructs many, and improves each by changing a few of its choices.

The search is hill climbing over the keys of `pack`, restarted from a perturbed elite solution (iterated local search)
or from new keys. It is far better than simulated annealing of single blocks, because a better arrangement of rectangles
is many single moves away from a good one, but only one or two keys away. It stops at the lower bound, if restarts no
longer improve the result, or if the effort is spent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from meshwright.planner.placement.block_grid import Grid
from meshwright.planner.placement.problem import Problem
from meshwright.planner.placement.rectangle_packing import FULL_ROWS, NEAR_SQUARE, RandomKeys, RectanglePacker

_SEED = 20_260
_PATIENCE = 100
_ELITE_PROBABILITY = 0.8
_SHAKE_FRACTION = 0.2
_MIN_RESTARTS = 8
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Assignment:
    """An assignment of every block and its cost."""

    bins: list[int]
    cost: float


class LocalSearch:
    """The search for one problem. `start` is the assignment so far. The blocks of `grids` are the ones to place."""

    def __init__(self, problem: Problem, start: Sequence[int], grids: Sequence[Grid], bound: float) -> None:
        self._problem = problem
        self._start = list(start)
        self._bound = bound
        self._random = Random(_SEED)
        capacity = [b.capacity for b in problem.bins]
        for block in problem.unplaced:
            if start[block] >= 0:
                capacity[start[block]] -= 1
        self._packers = [RectanglePacker(problem, grid, capacity) for grid in grids]
        self.best: Assignment | None = None
        self._best_tie_breaker: tuple[int, int, int] | None = None
        self._elite: dict[int, tuple[float, RandomKeys]] = {}

    def run(self, effort: int) -> Assignment:
        """Return the best placement found with about `effort` assignments of a block in total, and at least one try."""
        size = max(1, len(self._problem.unplaced))
        tries_left = max(1, effort // size)
        tries_left = min(tries_left, 40 * size * size + 40)
        for packer in self._packers:
            for keys in self._seeds(packer):
                if tries_left > 0 or self.best is None:
                    self._evaluate(packer, keys)
                    tries_left -= 1
        restart = last_improvement = 0
        while tries_left > 0 and not self._optimal() and restart - last_improvement <= 2 * size + _MIN_RESTARTS:
            before = self.best
            tries_left -= self._hill_climb(restart % len(self._packers), tries_left)
            restart += 1
            if before is None or self.best is None or self.best.cost < before.cost - _TOLERANCE:
                last_improvement = restart
        assert self.best is not None
        return self.best

    def _optimal(self) -> bool:
        return self.best is not None and self.best.cost <= self._bound + _TOLERANCE

    def _seeds(self, packer: RectanglePacker) -> list[RandomKeys]:
        """Deterministic constructions: large bins or tight locations first, in complete rows or near-squares."""
        capacity_by_place: list[dict[int, int]] = [{j: b.capacity for j, b in enumerate(self._problem.bins)}]
        for column in self._problem.places[1:]:
            capacity_by_place.append({})
            for place, b in zip(column, self._problem.bins, strict=True):
                capacity_by_place[-1][place] = capacity_by_place[-1].get(place, 0) + b.capacity
        blocks_to_place = len(self._problem.unplaced)
        largest_capacity = [max(found.values(), default=1) or 1 for found in capacity_by_place]

        def largest(level: int, place: int) -> float:
            return 1 - capacity_by_place[level][place] / largest_capacity[level]

        def tightest(level: int, place: int) -> float:
            place_capacity = capacity_by_place[level][place]
            return (
                place_capacity / largest_capacity[level]
                if place_capacity >= blocks_to_place
                else 2 - place_capacity / largest_capacity[level]
            ) / 2

        return [
            RandomKeys(self._random, packer.seed(rank, shape))
            for rank in (largest, tightest)
            for shape in (FULL_ROWS, NEAR_SQUARE)
        ]

    def _evaluate(self, packer: RectanglePacker, keys: RandomKeys) -> float:
        """The cost of one construction. If it is the lowest so far, the construction becomes the best one."""
        bins = list(self._start)
        packer.pack(keys, bins)
        cost = self._problem.cost(bins)
        best = self.best
        if best is None or cost < best.cost - _TOLERANCE:
            self.best, self._best_tie_breaker = Assignment(bins, cost), None
        elif cost <= best.cost + _TOLERANCE:
            self._keep_better_tie(bins, cost, best)
        return cost

    def _keep_better_tie(self, bins: list[int], cost: float, best: Assignment) -> None:
        if self._best_tie_breaker is None:
            self._best_tie_breaker = self._problem.tie_breaker(best.bins)
        tie_breaker = self._problem.tie_breaker(bins)
        if tie_breaker < self._best_tie_breaker:
            self.best, self._best_tie_breaker = Assignment(bins, cost), tie_breaker

    def _hill_climb(self, index: int, limit: int) -> int:
        """Change keys while that lowers the cost. Returns the number of constructions."""
        packer, keys = self._packers[index], self._restart_keys(index)
        cost = self._evaluate(packer, keys)
        evaluations, failures = 1, 0
        while evaluations < limit and failures < _PATIENCE and not self._optimal():
            neighbor = keys.changed()
            found = self._evaluate(packer, neighbor)
            evaluations += 1
            failures = 0 if found < cost - _TOLERANCE else failures + 1
            if found <= cost + _TOLERANCE:
                keys, cost = neighbor, found
        elite = self._elite.get(index)
        if elite is None or cost <= elite[0]:
            self._elite[index] = (cost, keys)
        return evaluations

    def _restart_keys(self, index: int) -> RandomKeys:
        """The keys that a climb starts with: the best keys so far with a fifth of them replaced, or new ones."""
        draw, elite = self._random.random, self._elite.get(index)
        if elite is None or draw() >= _ELITE_PROBABILITY:
            return RandomKeys(self._random)
        _, keys = elite
        return RandomKeys(self._random, [draw() if draw() < _SHAKE_FRACTION else v for v in keys.values[: keys.used]])
