"""Orders searched with what stages take: complete, within memory, in micro-batches' order, and no worse than others."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedules.actions import Kind, Schedule
from meshwright.schedules.automatic import automatic
from meshwright.schedules.generate import generate
from meshwright.schedules.measured import FINENESS, Report, Times, agreed, improved, rounded
from meshwright.schedules.simulate import EVEN, Costs, simulate
from meshwright.schedules.validate import problems

seconds = st.one_of(st.just(0.0), st.floats(1e-7, 1e3))
stages = st.lists(st.builds(Costs, seconds, seconds, seconds), min_size=2, max_size=5)


def numbers(schedule: Schedule, rank: int, kind: Kind) -> list[int]:
    return [action.micro_batch for action in schedule.actions(rank) if action.kind is kind]


@settings(max_examples=30, deadline=None)
@given(stages, st.integers(0, 9), st.integers(1, 12), seconds, st.booleans())
def test_any_costs_give_an_order_that_runs_within_its_limit_in_micro_batches_order(
    costs: list[Costs], more: int, limit: int, hop: float, rounds: bool
) -> None:
    times = Times(tuple(costs), hop)
    if rounds:
        times = rounded(times)
    micro_batches = len(costs) + more
    schedule = automatic(len(costs), micro_batches, limit, times.costs, times.hop)
    assert problems(schedule) == []
    assert max(simulate(schedule).in_flight) <= limit
    # Sums of a stage's gradients depend on the order within a kind, and on whether backward comes in halves.
    for rank in range(len(costs)):
        for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT):
            assert numbers(schedule, rank, kind) == list(range(micro_batches))


@settings(max_examples=15, deadline=None)
@given(stages, st.integers(0, 9), st.integers(1, 12), seconds)
def test_an_order_for_own_costs_is_no_worse_than_that_for_even_ones(
    costs: list[Costs], more: int, limit: int, hop: float
) -> None:
    times = rounded(Times(tuple(costs), hop))
    count = (len(costs), len(costs) + more, limit)
    own, even = automatic(*count, times.costs, times.hop), automatic(*count, EVEN, times.hop)
    assert simulate(own, times.costs, times.hop).makespan <= simulate(even, times.costs, times.hop).makespan


@pytest.mark.parametrize(
    ("skewed", "part"),
    [
        ([Costs(1.0, 1.6, 0.5)] * 4, 0.975),
        ([Costs(), Costs(1.2, 1.3, 1.2), Costs(), Costs()], 0.99),
    ],
    ids=["cheap weights", "a heavy stage"],
)
def test_skewed_stages_gain_by_an_order_of_their_own(skewed: list[Costs], part: float) -> None:
    times = rounded(Times(tuple(skewed), 0.05))
    even = automatic(4, 16, 6, EVEN, times.hop)
    own = improved(even, 6, times)
    assert max(simulate(own).in_flight) <= 6
    before, after = (simulate(order, times.costs, times.hop).makespan for order in (even, own))
    assert after < part * before


def test_an_order_is_kept_where_none_is_found_that_ends_sooner() -> None:
    kept = generate("zb-h1", 4, 8)
    even = Times((EVEN,) * 4, 0.0)
    assert simulate(automatic(4, 8, 4)).makespan == simulate(kept).makespan
    assert improved(kept, 4, even) is kept


def test_ranks_agree_on_the_median_of_each_stage() -> None:
    reports = [
        Report(0, Costs(1.0, 2.0, 3.0), 0.1),
        Report(1, Costs(5.0, 5.0, 5.0), 0.2),
        Report(0, Costs(2.0, 3.0, 4.0), 0.3),
        Report(0, Costs(90.0, 1.0, 3.5), 0.9),
        Report(1, Costs(7.0, 6.0, 5.0), 0.4),
    ]
    assert agreed(reports, 2) == Times((Costs(2.0, 2.0, 3.5), Costs(6.0, 5.5, 5.0)), 0.3)
    assert agreed(reports[::-1], 2) == agreed(reports, 2)
    with pytest.raises(ValueError, match="stage 2"):
        agreed(reports, 3)


def test_rounding_takes_noise_away_and_leaves_what_differs() -> None:
    noisy = Times((Costs(1.01e-3, 0.99e-3, 1.0e-3), Costs(0.98e-3, 1.02e-3, 1.0e-3)), 0.26e-3)
    assert rounded(noisy) == Times((EVEN, EVEN), 0.25)
    frozen = rounded(Times((Costs(1e-3, 2e-3, 3e-3), Costs(2e-3, 2e-3, 2e-9)), 0.0))
    assert frozen.costs == (Costs(0.625, 1.1875, 1.8125), Costs(1.1875, 1.1875, 1 / FINENESS))
    assert rounded(Times((Costs(0.0, 0.0, 0.0),) * 2, 0.0)).costs[0] == Costs(*[1 / FINENESS] * 3)


@pytest.mark.parametrize(
    ("costs", "hop"), [([EVEN, Costs(float("nan"))], 0.0), ([EVEN, Costs(-1.0)], 0.0), ([EVEN, EVEN], float("inf"))]
)
def test_costs_that_are_no_lengths_of_time_are_refused(costs: list[Costs], hop: float) -> None:
    with pytest.raises(ValueError, match="finite and at least 0"):
        automatic(2, 4, 2, costs, hop)
