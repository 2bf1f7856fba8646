"""Few rows that hold every legal pair of techniques (a pairwise covering array; greedy, as AETG, IEEE TSE 23(7), 1997).

Pure: what may go together and what a row costs is asked. The same seed gives the same rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations

Pair = frozenset[str]
Row = frozenset[str]
TRIES = 12
"""Rows that are put together for each that is taken."""


def pairs_of(factors: Mapping[str, Sequence[str]]) -> list[Pair]:
    """Every two techniques of different factors."""
    of = {name: factor for factor, names in factors.items() for name in names}
    return [frozenset(two) for two in combinations(of, 2) if of[two[0]] != of[two[1]]]


def cover(
    factors: Mapping[str, Sequence[str]],
    pairs: Iterable[Pair],
    legal: Callable[[Row], bool],
    counts: Callable[[Row, Pair], bool],
    cost: Callable[[Row], float],
    seed: int = 0,
) -> list[Row]:
    """Rows that hold every one of `pairs`.

    Args:
        factors: techniques, of which a row has at most one of each factor.
        pairs: what has to be held; each is a legal row by itself.
        legal: whether a row can be run.
        counts: whether a row that holds a pair is held to what the pair would be held to alone.
        cost: of running a row; a row is taken for what it newly holds in proportion.
        seed: of the order in which rows are put together.
    """
    chance = random.Random(seed)  # noqa: S311
    left, rows = dict.fromkeys(pairs), []
    while left:
        begin = next(iter(left))
        tried = [_row(begin, factors, left, legal, counts, chance) for _ in range(TRIES)]
        # Sorted, since sets of text have another order in every process.
        row = max(tried, key=lambda row: (len(_held(row, left, counts)) / cost(row), sorted(row)))
        rows.append(row)
        for pair in _held(row, left, counts):
            del left[pair]
    return rows


def _held(row: Row, left: Mapping[Pair, None], counts: Callable[[Row, Pair], bool]) -> list[Pair]:
    inside = (frozenset(two) for two in combinations(row, 2))
    return [pair for pair in inside if pair in left and counts(row, pair)]


def _row(
    begin: Pair,
    factors: Mapping[str, Sequence[str]],
    left: Mapping[Pair, None],
    legal: Callable[[Row], bool],
    counts: Callable[[Row, Pair], bool],
    chance: random.Random,
) -> Row:
    """A row that begins with a pair and takes of each other factor what then holds most."""
    row: Row = begin
    others = [names for names in factors.values() if not row & set(names)]
    chance.shuffle(others)
    for names in others:
        now = len(_held(row, left, counts))
        gains = [(len(_held(row | {name}, left, counts)) - now, chance.random(), name) for name in names]
        for gain, _, name in sorted(gains, reverse=True):
            if gain <= 0:
                break
            if counts(row | {name}, begin) and legal(row | {name}):
                row |= {name}
                break
    return row
