"""One rule: a field, what must hold of it, and the condition in CEL and in Python."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Subject = TypeVar("Subject", contravariant=True)

UNTIL_CHOSEN = {"self.parallelism.context": "1", "self.parallelism.schedule": "'1F1B'"}
"""What rules take a field for that is left out and chosen later; Python's side are properties of `ParallelismSpec`."""


@dataclass(frozen=True, slots=True)
class Rule(Generic[Subject]):
    """A condition on a whole spec, or, as `Rule[Facts]`, on a spec and on a resolved run alike."""

    field: str
    """The field to blame: a path below `spec`."""
    text: str | Callable[[], str]
    """What must hold, and the fix. A function where it names pipeline schedules: one may register later."""
    condition: str | Callable[[], str]
    """The condition in CEL over `self`, the spec with its defaults; a function for the same reason."""
    holds: Callable[[Subject], bool]
    """The same condition in Python."""

    @property
    def message(self) -> str:
        """What must hold, and the fix."""
        return self.text if isinstance(self.text, str) else self.text()

    @property
    def cel(self) -> str:
        """The condition for the API server, which reads what stands for a field where that is left out."""
        cel = self.condition if isinstance(self.condition, str) else self.condition()
        for field, default in UNTIL_CHOSEN.items():
            read = rf"(?<!has\(){re.escape(field)}\b"
            cel = re.sub(read, f"(has({field}) ? {field} : {default})", cel)
        return cel


def divides(divisor: int | None, number: int | None) -> bool:
    """Whether `number` is a multiple of `divisor`; so when either is not given."""
    return divisor is None or number is None or number % divisor == 0
