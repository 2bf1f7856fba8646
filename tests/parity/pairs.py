"""Which pairs of techniques are legal, and the rows that hold them: `python -m tests.parity.pairs` writes pairs.txt.

A line is a row, techniques joined by ` + `; behind ` : ` stands what an illegal pair's error says.
"""

from __future__ import annotations

import sys
from functools import cache
from itertools import combinations
from pathlib import Path

from tests.parity.case import Case
from tests.parity.combination import FEW_RANKS, RANKS, case_of, ranks_of, verdict
from tests.parity.covering_array import Pair, Row, cover, pairs_of
from tests.parity.techniques import TECHNIQUES

ROWS = Path(__file__).with_name("pairs.txt")
_AND, _REFUSED = " + ", " : "
_ROUNDING = frozenset(technique.name for technique in TECHNIQUES if technique.tolerance is not None)


def factors() -> dict[str, list[str]]:
    """The techniques by what they exclude each other in."""
    found: dict[str, list[str]] = {}
    for technique in TECHNIQUES:
        found.setdefault(technique.factor, []).append(technique.name)
    return found


def stored() -> list[Case]:
    """The cases of the file."""
    lines = [line.partition(_REFUSED) for line in ROWS.read_text().splitlines()]
    return [case_of(names.split(_AND), refused or None) for names, _, refused in lines]


def holds(row: Row, pair: Pair) -> bool:
    """Whether a row holds a pair to what the pair would be held to alone: what rounds hides the errors of the rest."""
    return pair <= row and row & _ROUNDING == pair & _ROUNDING


def generate() -> str:
    """The file, from what validation says of every pair."""
    pairs = pairs_of(factors())
    said = {pair: verdict(pair) for pair in pairs}
    illegal = {pair for pair, problem in said.items() if problem}

    @cache
    def together(row: Row) -> bool:
        return all(frozenset(two) not in illegal for two in combinations(row, 2)) and verdict(row) is None

    ranks, rows = cache(ranks_of), []
    left = [pair for pair in pairs if pair not in illegal]
    # A technique more costs a row of eight ranks four times what it costs one of four, so those hold only what must be.
    for most in (FEW_RANKS, RANKS):
        small = [pair for pair in left if ranks(pair) <= most]
        rows += cover(factors(), small, lambda row, most=most: ranks(row) <= most and together(row), holds, _cost)
        left = [pair for pair in left if not any(holds(row, pair) for row in rows)]
    refused = [f"{_line(pair)}{_REFUSED}{_first(problem)}" for pair, problem in said.items() if problem]
    return "\n".join([*map(_line, rows), *refused]) + "\n"


def _line(row: Row) -> str:
    return _AND.join(technique.name for technique in TECHNIQUES if technique.name in row)


def _first(problems: str) -> str:
    """The first of the problems; they begin with a field."""
    return problems.partition("; `")[0]


def _cost(row: Row) -> float:
    # Of little weight: many cheap rows cost more than few dear ones.
    layout = case_of(row).layout
    split, sharded, shared = layout.get("tensor", 1) > 1, layout.get("zero", 0) > 1, layout.get("context", 1) > 1
    of_rank = 1 + 0.4 * split + 0.5 * sharded + 0.3 * shared
    return float((0.3 + ranks_of(row) * of_rank) ** 0.3)


if __name__ == "__main__":
    ROWS.write_text(generate())
    sys.stdout.write(f"{len(ROWS.read_text().splitlines())} rows\n")
