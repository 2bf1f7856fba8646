"""A rule: a field, a message, and the condition in CEL and in Python."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

from meshwright.api.parallelism import (
    ASSUMED_CONTEXT,
    ASSUMED_CONTEXT_METHOD,
    ASSUMED_SCHEDULE,
    ASSUMED_ZERO_STAGE,
)
from meshwright.schedules.registry import schedules_where
from meshwright.schedules.schedule import PipelineScheduleKind

Subject = TypeVar("Subject", contravariant=True)

_ASSUMED = {
    "self.parallelism.context": str(ASSUMED_CONTEXT),
    "self.parallelism.contextMethod": repr(ASSUMED_CONTEXT_METHOD.value),
    "self.parallelism.schedule": repr(ASSUMED_SCHEDULE.value),
    "self.parallelism.zeroStage": str(ASSUMED_ZERO_STAGE),
}
"""CEL of what rules assume for a field that is left out. In Python these are properties of `ParallelismSpec`."""


@dataclass(frozen=True, slots=True)
class Rule(Generic[Subject]):
    """A condition on a spec, or, as `Rule[Facts]`, on a spec and on a resolved run."""

    field: str
    """The field that errors name: a path below `spec`."""
    text: str | Callable[[], str]
    """What must hold, why, and the fix. A function if it names pipeline schedules, because one may register later."""
    condition: str | Callable[[], str] | None
    """The condition in CEL over `self`, the spec with its defaults. A function for the same reason. None if only
    resolved runs are checked."""
    holds: Callable[[Subject], bool]
    """The same condition in Python."""

    @property
    def message(self) -> str:
        """What must hold, why, and the fix."""
        return self.text if isinstance(self.text, str) else self.text()

    @property
    def cel(self) -> str:
        """The condition for the API server, with the assumed value of each field that may be left out."""
        if self.condition is None:
            return "true"
        return _with_defaults(self.condition if isinstance(self.condition, str) else self.condition())


@cache
def _with_defaults(cel: str) -> str:
    for field, default in _ASSUMED.items():
        read = rf"(?<!has\(){re.escape(field)}\b"
        cel = re.sub(read, f"(has({field}) ? {field} : {default})", cel)
    return cel


def divides(divisor: int | None, number: int | None) -> bool:
    """Whether `number` is a multiple of `divisor`. True if either is None."""
    return divisor is None or number is None or number % divisor == 0


def is_asynchronous(kind: PipelineScheduleKind) -> bool:
    """Whether a schedule updates weights while other micro-batches are under way."""
    return kind.asynchronous


def schedule_is(condition: Callable[[PipelineScheduleKind], bool]) -> str:
    """In CEL, that the schedule meets a condition."""
    orders = [order.value for order in schedules_where(condition)]
    field = "self.parallelism.schedule"
    return f"{field} == {orders[0]!r}" if len(orders) == 1 else f"{field} in {orders!r}"


def schedule_is_not(condition: Callable[[PipelineScheduleKind], bool]) -> str:
    """In CEL, that the schedule does not meet a condition."""
    text = schedule_is(condition)
    return text.replace(" == ", " != ") if " == " in text else f"!({text})"


def schedule_names(condition: Callable[[PipelineScheduleKind], bool], last: str = "and") -> str:
    """The names of the schedules that meet a condition, for a message."""
    *names, name = (f"`{order.value}`" for order in schedules_where(condition))
    return f"{', '.join(names)} {last} {name}" if names else name
