"""An order searched with the times that ranks measured, as the zero-bubble paper's is (arXiv 2401.10241, section 3).

Pure: ranks that hold the same reports come to the same order, each by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from meshwright.schedules.actions import Schedule
from meshwright.schedules.schedule import PipelineScheduleKind, PipelineShape
from meshwright.schedules.simulator import ActionCosts, simulate

RESOLUTION = 16
"""Times are rounded to this part of their mean. Medians of equal stages differ by a few per cent, and an order that
follows such differences gains nothing; and sums of these numbers are exact, so that ties are ties."""


@dataclass(frozen=True, slots=True)
class TimingReport:
    """What one rank measured, in seconds."""

    stage: int
    costs: ActionCosts
    hop: float
    """To send a micro-batch's hidden states to a neighbor."""


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """The times of a pipeline's passes, in seconds or in units of their mean."""

    costs: tuple[ActionCosts, ...]
    """Of every stage."""
    hop: float


def median_times(reports: Sequence[TimingReport], stages: int) -> PipelineTimes:
    """The medians over the ranks that have the same stage; the median of sends over all ranks.

    Raises:
        ValueError: no rank reports a stage.
    """
    costs = []
    for stage in range(stages):
        stage_costs_reported = [report.costs for report in reports if report.stage == stage]
        if not stage_costs_reported:
            raise ValueError(f"no rank reports the times of stage {stage}")
        forward, backward_input, backward_weight = (
            median(column)
            for column in zip(
                *((c.forward, c.backward_input, c.backward_weight) for c in stage_costs_reported), strict=True
            )
        )
        costs.append(ActionCosts(forward, backward_input, backward_weight))
    return PipelineTimes(tuple(costs), median(report.hop for report in reports))


def round_times(times: PipelineTimes) -> PipelineTimes:
    """The times in units of the passes' mean, to a `RESOLUTION`-th of it; no pass takes less than that."""
    pass_seconds = [seconds for c in times.costs for seconds in (c.forward, c.backward_input, c.backward_weight)]
    # A clock that does not move tells nothing.
    unit = fmean(pass_seconds) / RESOLUTION or 1.0

    def steps(seconds: float) -> float:
        return max(1, round(seconds / unit)) / RESOLUTION

    costs = tuple(ActionCosts(steps(c.forward), steps(c.backward_input), steps(c.backward_weight)) for c in times.costs)
    return PipelineTimes(costs, round(times.hop / unit) / RESOLUTION)


def faster_schedule(kind: PipelineScheduleKind, schedule: Schedule, limit: int, times: PipelineTimes) -> Schedule:
    """Return `schedule`, or the kind's order for these times if that is simulated to end sooner.

    Args:
        kind: one with `measures_costs`.
        schedule: within `limit`, one stage a rank.
        limit: most micro-batches whose activations a rank may hold.
        times: as `round_times`.
    """
    shape = PipelineShape(schedule.stages, schedule.micro_batches, activation_limit=limit)
    measured = kind.generate_measured(shape, times.costs, times.hop)
    # A search with a fixed number of tries may miss the present order, which can be the better one.
    return min(schedule, measured, key=lambda order: simulate(order, times.costs, times.hop).makespan)
