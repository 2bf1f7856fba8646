"""The supported pairs of techniques, and the rows that cover them: `python -m tests.parity.pairs` writes pairs.txt.

A line is a row: techniques joined by ` + `. For an unsupported pair, ` : ` and its error follow.
"""

from __future__ import annotations

import sys
from functools import cache
from itertools import combinations
from pathlib import Path

from tests.parity.case import Case
from tests.parity.combination import FEW_RANKS, RANKS, case_of, ranks_of, verdict
from tests.parity.covering_array import Pair, Row, cover, pairs_of
from tests.parity.techniques import LATER, TECHNIQUES, later_than

ROWS = Path(__file__).with_name("pairs.txt")
_AND, _REJECTED = " + ", " : "
_ROUNDING = frozenset(technique.name for technique in TECHNIQUES if technique.tolerance is not None)


def factors() -> dict[str, list[str]]:
    """The techniques by factor: techniques of one factor exclude each other."""
    by_factor: dict[str, list[str]] = {}
    for technique in TECHNIQUES:
        by_factor.setdefault(technique.factor, []).append(technique.name)
    return by_factor


def stored() -> list[Case]:
    """The cases of the file."""
    lines = [line.partition(_REJECTED) for line in ROWS.read_text().splitlines()]
    return [case_of(names.split(_AND), error or None) for names, _, error in lines]


def covers(row: Row, pair: Pair) -> bool:
    """Whether a row tests a pair with the tolerance of the pair: a technique that rounds hides errors of the others."""
    return pair <= row and row & _ROUNDING == pair & _ROUNDING


def generate() -> str:
    """The content of the file, from the validation of every pair."""
    pairs = pairs_of(factors())
    errors = {pair: verdict(pair) for pair in pairs}
    unsupported = {pair for pair, error in errors.items() if error}

    @cache
    def together(row: Row) -> bool:
        return all(frozenset(two) not in unsupported for two in combinations(row, 2)) and verdict(row) is None

    ranks, rows = cache(ranks_of), []
    for later in map(later_than, range(len(LATER) + 1)):
        levels = {factor: [name for name in names if name not in later] for factor, names in factors().items()}
        among = {factor: names for factor, names in levels.items() if names}
        left = [pair for pair in pairs if pair not in unsupported and not pair & later]
        # Another technique costs a row of eight ranks four times as much as a row of four. Rows of eight ranks
        # therefore have only the pairs that need them.
        for most in (FEW_RANKS, RANKS):
            left = [pair for pair in left if not any(covers(row, pair) for row in rows)]
            small = [pair for pair in left if ranks(pair) <= most]
            rows += cover(among, small, lambda row, most=most: ranks(row) <= most and together(row), covers, _cost)
    rejected = [f"{_line(pair)}{_REJECTED}{_first(error)}" for pair, error in errors.items() if error]
    return "\n".join([*map(_line, rows), *rejected]) + "\n"


def _line(row: Row) -> str:
    return _AND.join(technique.name for technique in TECHNIQUES if technique.name in row)


def _first(problems: str) -> str:
    """The first of the problems, each of which begins with a field."""
    return problems.partition("; `")[0]


def _cost(row: Row) -> float:
    # The exponent gives the cost little weight, because many small rows cost more than a few large ones.
    layout = case_of(row).layout
    split, sharded, shared = layout.get("tensor", 1) > 1, layout.get("zero", 0) > 1, layout.get("context", 1) > 1
    of_rank = 1 + 0.4 * split + 0.5 * sharded + 0.3 * shared
    return float((0.3 + ranks_of(row) * of_rank) ** 0.3)


if __name__ == "__main__":
    ROWS.write_text(generate())
    sys.stdout.write(f"{len(ROWS.read_text().splitlines())} rows\n")
