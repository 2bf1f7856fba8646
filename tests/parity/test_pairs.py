"""Every legal pair of techniques is in the matrix, and every illegal one with its error."""

from __future__ import annotations

from itertools import combinations

import pytest

from meshwright_worker.trainer.train import validate_run
from tests.parity.combination import RANKS
from tests.parity.covering_array import cover, pairs_of
from tests.parity.matrix import all_cases
from tests.parity.pairs import ROWS, covers, factors, generate
from tests.parity.techniques import LATER, later_than

ROWS_OF_PAIRS = [case for case in all_cases() if case.together]
LEGAL = [case for case in ROWS_OF_PAIRS if case.refused is None]


def test_every_pair_is_in_a_row_or_rejected() -> None:
    refused = {frozenset(case.together) for case in ROWS_OF_PAIRS if case.refused is not None}
    rows = [frozenset(case.together) for case in LEGAL]
    missing = [
        sorted(pair)
        for pair in pairs_of(factors())
        if pair not in refused and not any(covers(row, pair) for row in rows)
    ]
    assert not missing, "run `python -m tests.parity.pairs`"


def test_rows_can_be_run() -> None:
    for case in LEGAL:
        run = case.run()
        validate_run(run)
        validate_run(case.reference())
        assert run.layout.world_size <= RANKS
        assert case.reference().layout.world_size == 1


def test_rows_with_later_techniques_come_after_the_others() -> None:
    for generation in range(len(LATER)):
        later = [not later_than(generation).isdisjoint(case.together) for case in LEGAL]
        assert any(later)
        assert later == sorted(later)


def test_what_rounds_does_not_hide_another_techniques_errors() -> None:
    assert not covers(frozenset({"ZeRO-1", "GPT", "fp8, static"}), frozenset({"ZeRO-1", "GPT"}))
    assert covers(frozenset({"ZeRO-1", "GPT", "fp8, static"}), frozenset({"GPT", "fp8, static"}))


def test_a_cover_holds_every_pair_in_legal_rows() -> None:
    levels = {factor: [f"{factor}{number}" for number in range(4)] for factor in "abcd"}
    forbidden = frozenset({"a0", "b0"}), frozenset({"c1", "d2"})
    wanted = [pair for pair in pairs_of(levels) if pair not in forbidden]
    rows = cover(levels, wanted, lambda row: not any(two <= row for two in forbidden), lambda *_: True, lambda _: 1.0)
    held = {frozenset(pair) for row in rows for pair in combinations(row, 2)}
    assert held == set(wanted)
    # 16 is the least there can be of 4 x 4 levels.
    assert len(rows) <= 26


@pytest.mark.long
def test_the_file_is_what_is_generated() -> None:
    assert ROWS.read_text() == generate(), "run `python -m tests.parity.pairs`"
