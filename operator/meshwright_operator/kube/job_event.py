"""Events that a decision asks to post about a job."""

from __future__ import annotations

from dataclasses import dataclass

NORMAL = "Normal"
WARNING = "Warning"


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One event about a job, for `kubectl describe`."""

    reason: str
    """CamelCase, from a fixed set."""
    message: str
    type: str = NORMAL
    """`NORMAL` or `WARNING`."""
