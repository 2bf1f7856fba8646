"""Two ways of doing the same work in turns: the ratio of their times, and how sure it is.

A machine drifts, so the two are timed in pairs and every other pair begins with the second (A B, B A, ...). The ratio
is the median of the pairs' ratios. Its interval is that of order statistics, which holds whatever the ratios'
distribution is (David and Nagaraja, "Order Statistics", section 7.1): one outlier moves neither end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

CONFIDENCE = 0.95
FEWEST = 6
"""Pairs below which no interval of the median has the confidence."""


@dataclass(frozen=True)
class Ratio:
    """Our time over theirs: below 1 we are faster."""

    median: float
    low: float
    """The median is above it, and below `high`, with a probability of at least `CONFIDENCE`."""
    high: float
    pairs: int

    def verdict(self, limit: float) -> str:
        """`within`, `above` or `undecided`: where the whole interval lies, of an overhead of at most `limit`."""
        if self.high <= 1 + limit:
            return "within"
        return "above" if self.low > 1 + limit else "undecided"


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """The ratio of paired times, in seconds.

    Raises:
        ValueError: the pairs are fewer than `FEWEST`, do not pair up, or are not above 0.
    """
    if len(ours) != len(theirs) or len(ours) < FEWEST:
        raise ValueError(f"{len(ours)} and {len(theirs)} times: an interval needs pairs, at least {FEWEST} of them")
    if min(*ours, *theirs) <= 0:
        raise ValueError("times must be above 0")
    ratios = sorted(own / other for own, other in zip(ours, theirs, strict=True))
    place = _place(len(ratios))
    return Ratio(median(ratios), ratios[place - 1], ratios[-place], len(ratios))


def _place(count: int) -> int:
    """Largest k such that the k-th smallest and the k-th largest of `count` enclose the median often enough."""
    outside, place = 0.0, 0
    while True:
        # The chance that at most `place` of the values lie on one side of the median, on both sides.
        outside += 2 * comb(count, place) / 2**count
        if outside > 1 - CONFIDENCE:
            return place
        place += 1


def in_turns(ours: Callable[[], float], theirs: Callable[[], float], pairs: int) -> tuple[list[float], list[float]]:
    """The seconds that each call says it took, pair by pair; every other pair begins with `theirs`."""
    own: list[float] = []
    other: list[float] = []
    for number in range(pairs):
        turns = [(ours, own), (theirs, other)]
        for run, took in turns if number % 2 == 0 else reversed(turns):
            took.append(run())
    return own, other
