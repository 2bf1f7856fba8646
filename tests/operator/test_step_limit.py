"""What limits the time of a step, from the times that ranks report."""

from __future__ import annotations

import math

import pytest

from meshwright.api.status import LimitKind, StepLimit
from meshwright.layout import Layout
from meshwright.protocol.messages import AgentState, RankProcess
from meshwright_operator.decide.step_limit import step_limit
from meshwright_operator.decide.stragglers import RankTimes, rank_times
from tests.operator.builders import report

LAYOUT = Layout(tensor=1, pipeline=2, data=2)
"""Ranks 0 and 2 have stage 0, ranks 1 and 3 stage 1."""


def limit_of(*times: RankTimes, layout: Layout = LAYOUT) -> tuple[LimitKind, int, int | None] | None:
    found = step_limit(list(times), layout, 1.0)
    return (found.kind, found.percent, found.rank) if found is not None else None


def even(**waits: float) -> list[RankTimes]:
    return [RankTimes(rank, 0, 0.8, 0.01, waits) for rank in range(4)]


def test_busy_ranks_are_limited_by_computation() -> None:
    assert limit_of(*even(data=0.05, job=0.02, pipeline=0.1)) == (LimitKind.COMPUTE, 80, None)


def test_a_rank_without_data_makes_the_others_wait() -> None:
    others = [RankTimes(rank, 0, 0.3, 0.0, {"job": 0.5, "data": 0.6}) for rank in (0, 1, 3)]
    assert limit_of(*others, RankTimes(2, 0, 0.3, 0.55)) == (LimitKind.DATA, 55, 2)


def test_a_slow_rank_makes_the_others_wait() -> None:
    others = [RankTimes(rank, 0, 0.4, 0.0, {"data": 0.5}) for rank in (0, 1, 3)]
    assert limit_of(*others, RankTimes(2, 0, 0.9)) == (LimitKind.RANK, 50, 2)


def test_a_slow_dimension() -> None:
    found = step_limit(even(data=0.35, pipeline=0.6), LAYOUT, 1.0)
    assert found == StepLimit(kind=LimitKind.COMMUNICATION, percent=35, dimension="data", rank=3)


def test_stages_that_wait_for_another_one() -> None:
    first, last = (0.4, 0.0, {"pipeline": 0.5}), (0.9, 0.0, {"pipeline": 0.0})
    times = [RankTimes(rank, 0, *(last if rank % 2 else first)) for rank in range(4)]
    found = step_limit(times, LAYOUT, 1.0)
    assert found == StepLimit(kind=LimitKind.PIPELINE, percent=25, stage=1)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, 1e9])
def test_without_the_time_of_a_step_nothing_is_known(seconds: float) -> None:
    assert step_limit(even(), LAYOUT, seconds) is None
    assert step_limit([], LAYOUT, 1.0) is None


def test_reports_that_cannot_be_are_ignored() -> None:
    processes = [
        RankProcess(rank=0, pid=1, compute_seconds=1.0, data_seconds=math.nan, waits={"data": -1.0, "job": 0.5}),
        RankProcess(rank=1, pid=1, compute_seconds=math.inf),
        RankProcess(rank=2, pid=1),
        RankProcess(rank=9, pid=1, compute_seconds=1.0),
    ]
    reports = [report(0, AgentState.RUNNING, ranks=processes), report(1, AgentState.RUNNING, 7, ranks=processes)]
    assert rank_times(reports, 1) == [RankTimes(0, 0, 1.0, 0.0, {"job": 0.5}), RankTimes(9, 0, 1.0)]
