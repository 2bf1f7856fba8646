"""A deadline for planning, in CPU time: a spec whose degrees are left out can have any number of layouts.

The search checks the deadline at each layout. CPU time is used, not elapsed time, so that a busy machine does not
change which specs can be planned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.errors import PlanError

DEADLINE_EXCEEDED = "PlanningDeadlineExceeded"
"""Reason of the condition of a job whose plan passed the deadline."""


class PlanningDeadlineError(PlanError):
    """The plan was not complete at its deadline. The message names the fields that make the search shorter."""

    def __init__(self, message: str) -> None:
        super().__init__(message, DEADLINE_EXCEEDED)


class _Current(threading.local):
    """The deadline of this thread, because CPU time is counted by thread."""

    end: float | None = None
    message: str = ""


_current = _Current()


@contextmanager
def planning_deadline(spec: ParallelTrainingJobSpec, cpu_seconds: float) -> Iterator[None]:
    """Within the block, planning in this thread raises `PlanningDeadlineError` after `cpu_seconds` of CPU time."""
    before = _current.end, _current.message
    _current.end, _current.message = time.thread_time() + cpu_seconds, deadline_message(spec, cpu_seconds)
    try:
        yield
    finally:
        _current.end, _current.message = before


def check_deadline() -> None:
    """Do nothing before the deadline of this thread.

    Raises:
        PlanningDeadlineError: the deadline has passed.
    """
    if _current.end is not None and time.thread_time() > _current.end:
        raise PlanningDeadlineError(_current.message)


def end_planning() -> None:
    """Let the planning of this thread raise at its next layout, as past its deadline. Signal handlers may call it."""
    if _current.end is not None:
        _current.end = float("-inf")


def deadline_message(spec: ParallelTrainingJobSpec, cpu_seconds: float) -> str:
    """What to change in a spec whose plan takes more than `cpu_seconds`: first the degrees that it leaves out."""
    asked = spec.parallelism
    degrees = {
        "tensor": asked.tensor,
        "context": asked.context,
        "pipeline": asked.pipeline,
        "microBatches": asked.micro_batches,
    }
    left_out = [f"`parallelism.{name}`" for name, value in degrees.items() if value is None]
    fixes = [f"set {' and '.join(left_out)}"] if left_out else []
    fixes.append("choose a `training.globalBatchSize`, `training.sequenceLength` or `model.layers` with fewer divisors")
    return f"no plan within {cpu_seconds:g} s of CPU time, because too many layouts are possible: {', or '.join(fixes)}"
