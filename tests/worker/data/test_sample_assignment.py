"""Which samples each replica of each island takes: all of them once, and none of another island's."""

from __future__ import annotations

from collections import Counter

import pytest

from meshwright_worker.data.sample_assignment import SampleAssignment

BATCH = 24
LAYOUTS = [(1, 1), (1, 4), (2, 1), (2, 3), (3, 2), (4, 1)]
"""Islands, and replicas in each."""


def cost(sample: int) -> int:
    return sample * sample * 7919 % 1009


def taken(place: SampleAssignment, step: range, balance: bool) -> list[int]:
    return place.balanced_samples(step, cost, 2) if balance else [*place.replica_samples(step)]


def places(islands: int, replicas: int, separate_data: bool) -> list[list[SampleAssignment]]:
    return [[SampleAssignment(i, islands, r, replicas, separate_data) for r in range(replicas)] for i in range(islands)]


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize(("islands", "replicas"), LAYOUTS)
def test_islands_of_one_text_share_out_each_step(islands: int, replicas: int, balance: bool) -> None:
    step = range(5 * BATCH, 6 * BATCH)
    share = BATCH // islands
    for island, own in enumerate(places(islands, replicas, separate_data=False)):
        found = [sample for place in own for sample in taken(place, step, balance)]
        # Balancing moves no sample from one island to another: what an island trains on is not a matter of speed.
        assert sorted(found) == [*step[island * share : (island + 1) * share]]


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize(("islands", "replicas"), LAYOUTS)
def test_islands_with_separate_texts_use_every_sample(islands: int, replicas: int, balance: bool) -> None:
    steps = [range(first, first + BATCH) for first in range(0, 10 * BATCH, BATCH)]
    for own in places(islands, replicas, separate_data=True):
        found = Counter(sample for step in steps for place in own for sample in taken(place, step, balance))
        assert found == Counter(range(10 * BATCH // islands))


def test_balance_evens_out_the_replicas_of_an_island() -> None:
    step = range(7 * BATCH, 8 * BATCH)

    def spread(*, balance: bool) -> int:
        (own,) = places(1, 4, separate_data=False)
        sums = [sum(map(cost, taken(place, step, balance))) for place in own]
        return max(sums) - min(sums)

    assert spread(balance=True) < spread(balance=False) / 2
