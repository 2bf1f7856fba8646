"""Samples dealt to corpora: exact shares, no gaps, decided by the number alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.corpus_mixture import BLOCK, Mixture

weights = st.lists(st.floats(0.1, 10), min_size=1, max_size=6)


@given(weights, st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_shares_hold_in_every_block_to_a_thousandth(parts: list[float], seed: int) -> None:
    mixture = Mixture(parts, seed)
    for block in (0, 7):
        counts = Counter(mixture.pick(block * BLOCK + place).corpus for place in range(BLOCK))
        for corpus, weight in enumerate(parts):
            assert abs(counts[corpus] - weight / sum(parts) * BLOCK) < 1 + len(parts) / 2


@given(weights, st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_each_corpus_gives_its_samples_in_order_without_a_gap(parts: list[float], seed: int) -> None:
    mixture = Mixture(parts, seed)
    used = [0] * len(parts)
    for number in range(3 * BLOCK):
        pick = mixture.pick(number)
        assert pick.sample == used[pick.corpus]
        used[pick.corpus] += 1


def test_a_number_determines_its_pick_in_any_order_of_requests() -> None:
    one, other = Mixture([1, 2], 3), Mixture([1, 2], 3)
    numbers = [5, 9999, 0, 123_456_789, 5]
    want = [one.pick(number) for number in numbers]
    assert [other.pick(number) for number in reversed(numbers)] == want[::-1]
    assert Mixture([1, 2], 4).pick(5) != want[0] or Mixture([1, 2], 4).pick(9999) != want[1]


def test_the_corpora_are_spread_over_a_block() -> None:
    mixture = Mixture([1, 1], 0)
    runs = [mixture.pick(number).corpus for number in range(BLOCK)]
    longest = max(len(run) for run in "".join(map(str, runs)).replace("01", "0 1").replace("10", "1 0").split())
    assert longest < 25


@pytest.mark.parametrize("parts", [[], [0.0, 1.0], [-1.0], [1.0, 1e-6]])
def test_weights_that_cannot_be_dealt(parts: list[float]) -> None:
    with pytest.raises(ValueError, match="weight"):
        Mixture(parts, 0)
