"""What can be found in minutes: every other method improving the fast path's answer and starting from nothing."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

from _exact import improve_part

from meshwright.planner.placement.problem import Problem

_PART_BLOCKS = 96


def best_in_minutes(problem: Problem, start: Sequence[int], seconds: float, seed: int) -> tuple[float, str]:
    """The least cost that annealing (from the answer and from nothing) and large-neighborhood search (parts of the
    answer solved by CP-SAT) find, each in a third of the time; and which of them found it.
    """
    draw = random.Random(seed)
    share = seconds / 3
    found = {
        "the fast path itself": problem.cost(start),
        "annealing": problem.cost(anneal(problem, start, share, draw)),
        "annealing from a random start": problem.cost(anneal(problem, _shuffled(problem, draw), share, draw)),
        "large-neighborhood search": problem.cost(neighborhoods(problem, start, share, draw)),
    }
    name = min(found, key=lambda key: found[key])
    return found[name], name


def _shuffled(problem: Problem, draw: random.Random) -> list[int]:
    slots = [j for j, b in enumerate(problem.bins) for _ in range(b.capacity)]
    return draw.sample(slots, problem.size)


def neighborhoods(problem: Problem, start: Sequence[int], seconds: float, draw: random.Random) -> list[int]:
    """Again and again a few bins that share groups, emptied and filled anew by CP-SAT."""
    bins, ends = list(start), time.monotonic() + seconds
    used = sorted(set(bins))
    while time.monotonic() < ends:
        first = draw.choice(used)
        blocks = [block for block, j in enumerate(bins) if j == first]
        group = problem.groups[draw.choice(problem.groups_of[draw.choice(blocks)])]
        near = [bins[block] for block in group.blocks if bins[block] != first]
        free, held = [first], len(blocks)
        for j in draw.sample(near, len(near)):
            if j not in free:
                held += sum(1 for other in bins if other == j)
                if held > _PART_BLOCKS:
                    break
                free.append(j)
        spare = draw.choice(problem.open_bins)
        bins = improve_part(problem, bins, list(dict.fromkeys([*free, spare])), min(5.0, ends - time.monotonic() + 0.1))
        used = sorted(set(bins))
    return bins


def anneal(problem: Problem, start: Sequence[int], seconds: float, draw: random.Random) -> list[int]:
    """Simulated annealing: one block changes places with another, or moves to a free place, next to its group."""
    ends, begun = time.monotonic() + seconds, time.monotonic()
    state = _State(problem, start)
    best, best_bins = state.cost, list(start)
    warmest = max(sum(group.weights) for group in problem.groups) / 4
    temperature, tried = warmest, 0
    while True:
        tried += 1
        if tried % 512 == 0:
            passed = (time.monotonic() - begun) / seconds
            if time.monotonic() >= ends:
                return best_bins
            temperature = warmest * 0.02**passed
        block = int(draw.random() * problem.size)
        group = problem.groups[draw.choice(problem.groups_of[block])]
        target = state.bins[group.blocks[int(draw.random() * len(group.blocks))]]
        if target == state.bins[block]:
            continue
        other = state.slots[target][int(draw.random() * len(state.slots[target]))]
        added = state.swap(block, other, target)
        if added > 0 and draw.random() >= math.exp(-added / temperature):
            state.undo()
        elif state.cost < best - 1e-9:
            best, best_bins = state.cost, list(state.bins)


class _State:
    """An assignment with the counts that make a move cheap to price. A slot is a place for one block; -1 is free."""

    def __init__(self, problem: Problem, bins: Sequence[int]) -> None:
        self._problem = problem
        self.bins = list(bins)
        self.cost = problem.cost(bins)
        self.slots: list[list[int]] = [[-1] * b.capacity for b in problem.bins]
        self._slot_of = [0] * problem.size
        filled = [0] * len(problem.bins)
        for block, j in enumerate(bins):
            self.slots[j][filled[j]] = block
            self._slot_of[block] = filled[j]
            filled[j] += 1
        self._counts = [[[0] * (max(places) + 1) for places in problem.places] for _ in problem.groups]
        for index, group in enumerate(problem.groups):
            for block in group.blocks:
                for level, places in enumerate(problem.places):
                    self._counts[index][level][places[bins[block]]] += 1
        self._last: tuple[int, int, int] = (0, -1, 0)

    def swap(self, block: int, other: int, target: int) -> float:
        """Moves `block` to `target` and `other` (a block there, or -1) to where it was; returns the added cost."""
        source = self.bins[block]
        position = self._slot_of[other] if other >= 0 else self.slots[target].index(-1)
        self._last = (block, other, source)
        added = self._shift(block, source, target)
        self.slots[source][self._slot_of[block]] = other
        if other >= 0:
            added += self._shift(other, target, source)
            self._slot_of[other] = self._slot_of[block]
        self.slots[target][position] = block
        self._slot_of[block] = position
        self.cost += added
        return added

    def undo(self) -> None:
        """Takes the last swap back."""
        block, other, source = self._last
        self.swap(block, other, source)

    def _shift(self, block: int, source: int, target: int) -> float:
        self.bins[block] = target
        added = 0.0
        for index in self._problem.groups_of[block]:
            weights, counts = self._problem.groups[index].weights, self._counts[index]
            for level, places in enumerate(self._problem.places):
                out, into = places[source], places[target]
                if out == into:
                    continue
                counts[level][out] -= 1
                added -= weights[level] * (counts[level][out] == 0)
                added += weights[level] * (counts[level][into] == 0)
                counts[level][into] += 1
        return added
