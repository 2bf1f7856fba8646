"""One rule, in both languages."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from meshwright.api.spec import ParallelTrainingJobSpec

UNTIL_CHOSEN = {"self.parallelism.context": "1", "self.parallelism.schedule": "'1F1B'"}
"""What rules take a field for that is left out and chosen later; Python's side are properties of `ParallelismSpec`."""


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

    def __post_init__(self) -> None:
        object.__setattr__(self, "cel", _until_chosen(self.cel))


def _until_chosen(cel: str) -> str:
    """A condition that reads what stands for a field where that is left out."""
    for field, default in UNTIL_CHOSEN.items():
        read = rf"(?<!has\(){re.escape(field)}\b"
        cel = re.sub(read, f"(has({field}) ? {field} : {default})", cel)
    return cel


def divides(divisor: int | None, number: int | None) -> bool:
    """Whether `number` is a multiple of `divisor`; so when either is not given."""
    return divisor is None or number is None or number % divisor == 0
