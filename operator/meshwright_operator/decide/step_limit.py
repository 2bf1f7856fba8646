"""What limits the time of a step, from the times that all ranks report.

Ranks wait for each other, so the longest wait alone misleads: who waits for a slow rank, or for one without data, waits
in a collective. So what makes others wait is looked for first: data, then a rank that computes longer than its peers,
then a dimension whose collectives take long, then other stages. If nothing does, steps take as long as computation.
"""

from __future__ import annotations

from statistics import fmean, median

from meshwright.api.status import LimitKind, StepLimit
from meshwright.layout import Layout
from meshwright_operator.decide.stragglers import LONGEST_SECONDS, RankTimes, by_stage

DATA_SHARE = 0.1
RANK_SHARE = 0.1
COMMUNICATION_SHARE = 0.2
PIPELINE_SHARE = 0.2
"""Parts of a step from which on each of them is the limit."""
COLLECTIVE_DIMENSIONS = ("tensor", "context", "expert", "data")
"""Dimensions whose collectives may be the limit. Reports come from users' pods: others are ignored."""
_ROUNDED = 5
_PIPELINE, _JOB = "pipeline", "job"


def step_limit(times: list[RankTimes], layout: Layout, step_seconds: float) -> StepLimit | None:
    """Return what limits steps of this length; None if the ranks report no times."""
    if not times or not 0 < step_seconds <= LONGEST_SECONDS:
        return None
    found = (
        _data(times, step_seconds)
        or _slow_rank(times, layout, step_seconds)
        or _communication(times, step_seconds)
        or _pipeline(times, layout, step_seconds)
    )
    return found or StepLimit(
        kind=LimitKind.COMPUTE, percent=_percent(fmean(entry.compute for entry in times) / step_seconds)
    )


def _data(times: list[RankTimes], step: float) -> StepLimit | None:
    longest = max(times, key=lambda entry: entry.data)
    if longest.data < DATA_SHARE * step:
        return None
    return StepLimit(kind=LimitKind.DATA, percent=_percent(longest.data / step), rank=longest.rank)


def _slow_rank(times: list[RankTimes], layout: Layout, step: float) -> StepLimit | None:
    """By how much the slowest rank of a stage computes longer than its peers."""
    worst: tuple[float, int] = (0.0, -1)
    for stage in by_stage(times, layout).values():
        slowest = max(stage, key=lambda entry: entry.compute)
        peers = [entry.compute for entry in stage if entry is not slowest]
        if peers:
            worst = max(worst, (slowest.compute - median(peers), slowest.rank))
    excess, rank = worst
    if excess < RANK_SHARE * step:
        return None
    return StepLimit(kind=LimitKind.RANK, percent=_percent(excess / step), rank=rank)


def _communication(times: list[RankTimes], step: float) -> StepLimit | None:
    waits = [
        (seconds, name, entry.rank)
        for entry in times
        for name, seconds in entry.waits.items()
        if name in COLLECTIVE_DIMENSIONS
    ]
    seconds, name, rank = max(waits, default=(0.0, "", 0))
    if seconds < COMMUNICATION_SHARE * step:
        return None
    return StepLimit(kind=LimitKind.COMMUNICATION, percent=_percent(seconds / step), dimension=name, rank=rank)


def _pipeline(times: list[RankTimes], layout: Layout, step: float) -> StepLimit | None:
    """The mean part of a step in which ranks wait for other stages: the bubble, and stages that take longer."""
    share = fmean(entry.waits.get(_PIPELINE, 0.0) + entry.waits.get(_JOB, 0.0) for entry in times) / step
    if layout.pipeline == 1 or share < PIPELINE_SHARE:
        return None
    stages = by_stage(times, layout)
    longest = max(stages, key=lambda stage: median(entry.compute for entry in stages[stage]))
    return StepLimit(kind=LimitKind.PIPELINE, percent=_percent(share), stage=longest)


def _percent(share: float) -> int:
    return max(0, min(100, _ROUNDED * round(100 * share / _ROUNDED)))
