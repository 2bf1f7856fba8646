"""Orders searched with what stages take: complete, within memory, in micro-batches' order, and no worse than others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.api.parallelism import PipelineSchedule
from meshwright.schedules.actions import ActionKind, Schedule
from meshwright.schedules.automatic import Automatic, automatic
from meshwright.schedules.measured_costs import (
    RESOLUTION,
    PipelineTimes,
    TimingReport,
    faster_schedule,
    median_times,
    round_times,
)
from meshwright.schedules.registry import generate, kind_of
from meshwright.schedules.schedule import PipelineShape
from meshwright.schedules.simulator import UNIT_COSTS, ActionCosts, simulate
from meshwright.schedules.validate import schedule_problems

seconds = st.one_of(st.just(0.0), st.floats(1e-7, 1e3))
stages = st.lists(st.builds(ActionCosts, seconds, seconds, seconds), min_size=2, max_size=5)


def numbers(schedule: Schedule, rank: int, kind: ActionKind) -> list[int]:
    return [action.micro_batch for action in schedule.actions(rank) if action.kind is kind]


@settings(max_examples=30, deadline=None)
@given(stages, st.integers(0, 9), st.integers(1, 12), seconds, st.booleans())
def test_any_costs_give_an_order_that_runs_within_its_limit_in_micro_batches_order(
    costs: list[ActionCosts], more: int, limit: int, hop: float, rounds: bool
) -> None:
    times = PipelineTimes(tuple(costs), hop)
    if rounds:
        times = round_times(times)
    micro_batches = len(costs) + more
    schedule = automatic(len(costs), micro_batches, limit, times.costs, times.hop)
    assert schedule_problems(schedule) == []
    assert max(simulate(schedule).in_flight) <= limit
    # Sums of a stage's gradients depend on the order within a kind, and on whether backward comes in halves.
    for rank in range(len(costs)):
        for kind in (ActionKind.FORWARD, ActionKind.INPUT, ActionKind.WEIGHT):
            assert numbers(schedule, rank, kind) == list(range(micro_batches))


@settings(max_examples=15, deadline=None)
@given(stages, st.integers(0, 9), st.integers(1, 12), seconds)
def test_an_order_for_uneven_costs_is_no_worse_than_that_for_even_ones(
    costs: list[ActionCosts], more: int, limit: int, hop: float
) -> None:
    times = round_times(PipelineTimes(tuple(costs), hop))
    count = (len(costs), len(costs) + more, limit)
    own, even = automatic(*count, times.costs, times.hop), automatic(*count, UNIT_COSTS, times.hop)
    assert simulate(own, times.costs, times.hop).makespan <= simulate(even, times.costs, times.hop).makespan


@pytest.mark.parametrize(
    ("skewed", "part"),
    [
        ([ActionCosts(1.0, 1.6, 0.5)] * 4, 0.975),
        ([ActionCosts(), ActionCosts(1.2, 1.3, 1.2), ActionCosts(), ActionCosts()], 0.99),
    ],
    ids=["cheap weights", "a heavy stage"],
)
def test_skewed_stages_gain_by_an_order_of_their_own(skewed: list[ActionCosts], part: float) -> None:
    times = round_times(PipelineTimes(tuple(skewed), 0.05))
    even = automatic(4, 16, 6, UNIT_COSTS, times.hop)
    own = faster_schedule(kind_of(PipelineSchedule.AUTOMATIC), even, 6, times)
    assert max(simulate(own).in_flight) <= 6
    before, after = (simulate(order, times.costs, times.hop).makespan for order in (even, own))
    assert after < part * before


def test_an_order_stays_if_no_shorter_one_exists() -> None:
    kept = generate("zb-h1", 4, 8)
    even = PipelineTimes((UNIT_COSTS,) * 4, 0.0)
    assert simulate(automatic(4, 8, 4)).makespan == simulate(kept).makespan
    assert faster_schedule(kind_of(PipelineSchedule.AUTOMATIC), kept, 4, even) is kept


class ZeroBubbleWhenMeasured(Automatic):
    """A schedule with another order for measured times."""

    def generate_measured(self, shape: PipelineShape, costs: Sequence[ActionCosts], hop: float) -> Schedule:
        """ZB-H2, whose bubble is smaller than that of ZB-H1."""
        assert (shape.ranks, shape.micro_batches, shape.limit, len(costs), hop) == (4, 8, 7, 4, 0.5)
        return generate("zb-h2", shape.ranks, shape.micro_batches)


def test_the_schedules_class_generates_the_order_for_measured_times() -> None:
    times = PipelineTimes((UNIT_COSTS,) * 4, 0.5)
    assert faster_schedule(ZeroBubbleWhenMeasured(), generate("zb-h1", 4, 8), 7, times) == generate("zb-h2", 4, 8)


def test_ranks_agree_on_the_median_of_each_stage() -> None:
    reports = [
        TimingReport(0, ActionCosts(1.0, 2.0, 3.0), 0.1),
        TimingReport(1, ActionCosts(5.0, 5.0, 5.0), 0.2),
        TimingReport(0, ActionCosts(2.0, 3.0, 4.0), 0.3),
        TimingReport(0, ActionCosts(90.0, 1.0, 3.5), 0.9),
        TimingReport(1, ActionCosts(7.0, 6.0, 5.0), 0.4),
    ]
    assert median_times(reports, 2) == PipelineTimes((ActionCosts(2.0, 2.0, 3.5), ActionCosts(6.0, 5.5, 5.0)), 0.3)
    assert median_times(reports[::-1], 2) == median_times(reports, 2)
    with pytest.raises(ValueError, match="stage 2"):
        median_times(reports, 3)


def test_rounding_removes_noise_and_preserves_differences() -> None:
    noisy = PipelineTimes((ActionCosts(1.01e-3, 0.99e-3, 1.0e-3), ActionCosts(0.98e-3, 1.02e-3, 1.0e-3)), 0.26e-3)
    assert round_times(noisy) == PipelineTimes((UNIT_COSTS, UNIT_COSTS), 0.25)
    frozen = round_times(PipelineTimes((ActionCosts(1e-3, 2e-3, 3e-3), ActionCosts(2e-3, 2e-3, 2e-9)), 0.0))
    assert frozen.costs == (ActionCosts(0.625, 1.1875, 1.8125), ActionCosts(1.1875, 1.1875, 1 / RESOLUTION))
    assert round_times(PipelineTimes((ActionCosts(0.0, 0.0, 0.0),) * 2, 0.0)).costs[0] == ActionCosts(
        *[1 / RESOLUTION] * 3
    )


@pytest.mark.parametrize(
    ("costs", "hop"),
    [
        ([UNIT_COSTS, ActionCosts(float("nan"))], 0.0),
        ([UNIT_COSTS, ActionCosts(-1.0)], 0.0),
        ([UNIT_COSTS, UNIT_COSTS], float("inf")),
    ],
)
def test_costs_that_are_not_durations_are_rejected(costs: list[ActionCosts], hop: float) -> None:
    with pytest.raises(ValueError, match="finite and at least 0"):
        automatic(2, 4, 2, costs, hop)
