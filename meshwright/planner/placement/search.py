"""Searching placements: many constructions, each improved by changing a few of its choices.

Hill climbing over the keys of `carve`, restarted from a shaken elite (iterated local search) or anew, beats annealing
of single blocks by far: a better arrangement of rectangles is many single moves away from a good one, but only one or
two keys. Stops at the lower bound, when restarts no longer find anything better, or when the effort is spent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from meshwright.planner.placement.carve import FULL_ROWS, NEAR_SQUARE, Carver, Keys
from meshwright.planner.placement.grid import Grid
from meshwright.planner.placement.problem import Problem

_SEED = 20_260
_PATIENCE = 100
_FROM_ELITE = 0.8
_SHAKEN = 0.2
_MIN_RESTARTS = 8
_NEAR = 1e-9


@dataclass(frozen=True, slots=True)
class Found:
    """An assignment of every block and its cost."""

    bins: list[int]
    cost: float


class Search:
    """One problem's search. `start` is the assignment so far; the blocks of `grids` are the ones that are placed."""

    def __init__(self, problem: Problem, start: Sequence[int], grids: Sequence[Grid], bound: float) -> None:
        self._problem = problem
        self._start = list(start)
        self._bound = bound
        self._random = Random(_SEED)
        capacity = [b.capacity for b in problem.bins]
        for block in problem.movable:
            if start[block] >= 0:
                capacity[start[block]] -= 1
        self._carvers = [Carver(problem, grid, capacity) for grid in grids]
        self.best: Found | None = None
        self._tidiness: tuple[int, int, int] | None = None
        self._elite: dict[int, tuple[float, Keys]] = {}

    def run(self, effort: int) -> Found:
        """The best placement that was found by assigning at most about `effort` blocks in all, and at least once."""
        size = max(1, len(self._problem.movable))
        left = max(1, effort // size)
        left = min(left, 40 * size * size + 40)
        for carver in self._carvers:
            for keys in self._seeds(carver):
                if left > 0 or self.best is None:
                    self._try(carver, keys)
                    left -= 1
        turn = last = 0
        while left > 0 and not self._optimal() and turn - last <= 2 * size + _MIN_RESTARTS:
            before = self.best
            left -= self._climb(turn % len(self._carvers), left)
            turn += 1
            if before is None or self.best is None or self.best.cost < before.cost - _NEAR:
                last = turn
        assert self.best is not None
        return self.best

    def _optimal(self) -> bool:
        return self.best is not None and self.best.cost <= self._bound + _NEAR

    def _seeds(self, carver: Carver) -> list[Keys]:
        """Constructions without chance: large bins first or tight places first, in whole rows or near-squares."""
        room: list[dict[int, int]] = [{j: b.capacity for j, b in enumerate(self._problem.bins)}]
        for column in self._problem.places[1:]:
            room.append({})
            for place, b in zip(column, self._problem.bins, strict=True):
                room[-1][place] = room[-1].get(place, 0) + b.capacity
        needed = len(self._problem.movable)
        most = [max(found.values(), default=1) or 1 for found in room]

        def largest(level: int, place: int) -> float:
            return 1 - room[level][place] / most[level]

        def tightest(level: int, place: int) -> float:
            held = room[level][place]
            return (held / most[level] if held >= needed else 2 - held / most[level]) / 2

        return [
            Keys(self._random, carver.seed(rank, shape))
            for rank in (largest, tightest)
            for shape in (FULL_ROWS, NEAR_SQUARE)
        ]

    def _try(self, carver: Carver, keys: Keys) -> float:
        """The cost of one construction, which becomes the best when it is."""
        bins = list(self._start)
        carver.carve(keys, bins)
        cost = self._problem.cost(bins)
        best = self.best
        if best is None or cost < best.cost - _NEAR:
            self.best, self._tidiness = Found(bins, cost), None
        elif cost <= best.cost + _NEAR:
            self._keep_tidier(bins, cost, best)
        return cost

    def _keep_tidier(self, bins: list[int], cost: float, best: Found) -> None:
        if self._tidiness is None:
            self._tidiness = self._problem.tidiness(best.bins)
        tidiness = self._problem.tidiness(bins)
        if tidiness < self._tidiness:
            self.best, self._tidiness = Found(bins, cost), tidiness

    def _climb(self, index: int, limit: int) -> int:
        """Changes keys while that helps; returns how many constructions it took."""
        carver, keys = self._carvers[index], self._start_of(index)
        cost = self._try(carver, keys)
        tried, failed = 1, 0
        while tried < limit and failed < _PATIENCE and not self._optimal():
            other = keys.changed()
            found = self._try(carver, other)
            tried += 1
            failed = 0 if found < cost - _NEAR else failed + 1
            if found <= cost + _NEAR:
                keys, cost = other, found
        elite = self._elite.get(index)
        if elite is None or cost <= elite[0]:
            self._elite[index] = (cost, keys)
        return tried

    def _start_of(self, index: int) -> Keys:
        """Where a climb starts: the best keys so far with a fifth of them drawn anew, or new ones."""
        draw, elite = self._random.random, self._elite.get(index)
        if elite is None or draw() >= _FROM_ELITE:
            return Keys(self._random)
        _, keys = elite
        return Keys(self._random, [draw() if draw() < _SHAKEN else v for v in keys.values[: keys.used]])
