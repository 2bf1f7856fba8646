"""What limits a step, on real ranks: a slow rank, a slow stage, a slow link and late data are each named."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from meshwright.api.status import LimitKind, StepLimit
from meshwright.protocol.messages import AgentState
from meshwright_operator.decide.step_limit import step_limit
from meshwright_operator.decide.stragglers import rank_times
from tests.distributed.configs import small_run
from tests.distributed.limit_cases import COMPUTE, DATA, LINK, reported_times
from tests.distributed.rank_pool import RankPool
from tests.operator.builders import report

PIPELINE = {"pipeline": 2, "data": 2}
"""Ranks 0 and 2 have stage 0, ranks 1 and 3 stage 1."""


def limit(pool: RankPool, text: Path, layout: dict[str, Any], *slow: Any) -> StepLimit:
    run = small_run(**layout, steps=5, training={}, micro_batches=2)
    answers = pool.run(reported_times, run, *slow, checkpoint_dir=None, data_dir=text)
    reports = [report(rank, AgentState.RUNNING, ranks=[process]) for rank, (process, _) in enumerate(answers)]
    for process, steps in answers:
        check_parts(steps)
        assert process.compute_seconds is not None
    _, of_rank_zero = answers[0]
    seconds = fmean(step.seconds for step in of_rank_zero)
    found = step_limit(rank_times(reports, 1), run.layout, seconds)
    assert found is not None
    return found


def check_parts(steps: list[Any]) -> None:
    """The parts of a step of a rank sum to its time within 5%, in most steps: between two parts, the machine may run
    something else.
    """
    shares = [
        (step.data_seconds + step.times.compute + step.times.update + sum(step.times.waits.values())) / step.seconds
        for step in steps
    ]
    assert median(shares) == pytest.approx(1, rel=0.05), shares


def test_a_slow_rank(pool: RankPool, text: Path) -> None:
    found = limit(pool, text, PIPELINE, COMPUTE, [2], 0.01)
    assert (found.kind, found.rank) == (LimitKind.RANK, 2)


@pytest.mark.long
def test_a_slow_stage(pool: RankPool, text: Path) -> None:
    found = limit(pool, text, PIPELINE, COMPUTE, [1, 3], 0.01)
    assert (found.kind, found.stage) == (LimitKind.PIPELINE, 1)


def test_a_slow_link(pool: RankPool, text: Path) -> None:
    found = limit(pool, text, {"tensor": 2}, LINK, [0, 1], 0.02)
    assert (found.kind, found.dimension) == (LimitKind.COMMUNICATION, "tensor")


def test_late_data(pool: RankPool, text: Path) -> None:
    found = limit(pool, text, {"data": 2}, DATA, [1], 0.3)
    assert (found.kind, found.rank) == (LimitKind.DATA, 1)
