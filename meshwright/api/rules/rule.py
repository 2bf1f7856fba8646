"""One rule, in both languages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.api.spec import ParallelTrainingJobSpec


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition on the whole spec."""

    field: str
    """The field to blame: a path below `spec`."""
    message: str
    """What must hold, and the fix."""
    cel: str
    """The condition over `self`, the spec with its defaults."""
    holds: Callable[[ParallelTrainingJobSpec], bool]
    """The same condition."""


def divides(divisor: int | None, number: int | None) -> bool:
    """Whether `number` is a multiple of `divisor`; so when either is not given."""
    return divisor is None or number is None or number % divisor == 0
