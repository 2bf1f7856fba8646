"""Pipeline schedules by name. The modules imported here hold this package's schedules, which register themselves."""

from __future__ import annotations

from collections.abc import Callable

import meshwright.schedules.automatic
import meshwright.schedules.classic
import meshwright.schedules.dual_pipe
import meshwright.schedules.pipedream
import meshwright.schedules.zero_bubble  # noqa: F401
from meshwright.api.parallelism import PipelineSchedule
from meshwright.schedules.actions import Schedule
from meshwright.schedules.schedule import PipelineScheduleKind, PipelineShape, registered, registered_kind

kind_of = registered_kind
"""The class of a value of `parallelism.schedule`."""


def schedules_where(condition: Callable[[PipelineScheduleKind], bool]) -> tuple[PipelineSchedule, ...]:
    """The schedules that meet a condition, in the order of the API's values."""
    return tuple(kind.order for kind in registered() if condition(kind))


NAMES = tuple(kind.short_name for kind in registered() if kind.own_order)
"""Short names of the schedules whose order follows from their numbers."""


def named(short_name: str) -> PipelineScheduleKind:
    """The schedule with a short name.

    Raises:
        ValueError: there is none.
    """
    for kind in registered():
        if kind.short_name == short_name:
            return kind
    raise ValueError(
        f"no schedule is called `{short_name}`: use one of {', '.join(k.short_name for k in registered())}"
    )


def generate(short_name: str, ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """The order of a schedule.

    Args:
        short_name: one of `NAMES`.
        ranks: pipeline ranks.
        micro_batches: of one step.
        chunks: stages of one rank, where the schedule lets one choose.

    Raises:
        ValueError: the name is not known, or the schedule cannot be made for these numbers; the text says why.
    """
    return named(short_name).generate(PipelineShape(ranks, micro_batches, chunks))
