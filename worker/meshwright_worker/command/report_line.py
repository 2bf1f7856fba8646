"""The lines that a user's command writes to its report file: one JSON object per line. Pure.

A line is about a step that is complete, or about a load: then it has `work` instead of `step`. Unknown fields are
ignored.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

MAX_LINE = 4096
MAX_NUMBER = (1 << 53) - 1
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters, and how Python reads a file's name that is not UTF-8."""


class ReportLineError(ValueError):
    """A line that does not report anything. The message names the field and what it must contain."""


@dataclass(frozen=True, slots=True)
class ReportedStep:
    """A step that the command has completed. None: not reported."""

    step: int
    loss: float | None = None
    """Mean loss per token."""
    tokens: int | None = None
    """Tokens of the step, over all ranks."""
    learning_rate: float | None = None
    total_steps: int | None = None
    """Steps of the entire run."""
    checkpoint: str | None = None
    """Path of a checkpoint of this step that is complete."""


@dataclass(frozen=True, slots=True)
class ReportedWork:
    """How much of a load is done, in bytes."""

    name: str
    done: int
    total: int | None = None
    """None: not known."""
    seconds: float | None = None
    """Time since it began. None: not reported."""


LOADS = ("verify", "checkpoint", "weights")
"""What a command may report: names of `RankWork`, in bytes."""


def parse_line(line: bytes) -> ReportedStep | ReportedWork:
    """Read one line.

    Raises:
        ReportLineError: it is not valid.
    """
    found = _object(line)
    return _work(found) if "step" not in found and "work" in found else _step(found)


def parse_report(line: bytes) -> ReportedStep:
    """Read one line about a step.

    Raises:
        ReportLineError: it is not valid.
    """
    return _step(_object(line))


def _object(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_LINE:
        raise ReportLineError(f"a line must have at most {MAX_LINE} bytes, got {len(line)}")
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise ReportLineError("a line must be a JSON object") from None
    if not isinstance(found, dict):
        raise ReportLineError("a line must be a JSON object")
    return found


def _work(found: dict[str, Any]) -> ReportedWork:
    name = found["work"]
    if name not in LOADS:
        raise ReportLineError(f"`work` must be one of {', '.join(f'`{one}`' for one in LOADS)}, got {name!r:.100}")
    done, total, seconds = _count(found, "done"), _count(found, "total"), _number(found, "seconds")
    if done is None:
        raise ReportLineError("`done` is required with `work`")
    if total is not None and done > total:
        raise ReportLineError(f"`done` must be at most `total`, got {done} of {total}")
    return ReportedWork(name, done, total, seconds)


def _step(found: dict[str, Any]) -> ReportedStep:
    step = _count(found, "step")
    if step is None:
        raise ReportLineError("`step` is required")
    path = found.get("checkpoint")
    # A name with a null character could be no variable of the next start, and no file; one that is not UTF-8 no report.
    if path is not None and not (isinstance(path, str) and 0 < len(path) <= 1024 and not _FORBIDDEN.search(path)):
        raise ReportLineError(
            "`checkpoint` must be a path in UTF-8 of at most 1024 characters, without control characters"
        )
    return ReportedStep(
        step=step,
        loss=_number(found, "loss"),
        tokens=_count(found, "tokens"),
        learning_rate=_number(found, "learning_rate"),
        total_steps=_count(found, "total_steps"),
        checkpoint=path,
    )


def _number(found: dict[str, Any], name: str) -> float | None:
    value = found.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ReportLineError(f"`{name}` must be a number, got {value!r:.100}")
    # Compared before it is converted: JSON has integers that no float can hold.
    return float(value) if abs(value) <= MAX_NUMBER or value in (math.inf, -math.inf) else math.nan


def _count(found: dict[str, Any], name: str) -> int | None:
    value = found.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_NUMBER:
        raise ReportLineError(f"`{name}` must be an integer of at least 0, got {value!r:.100}")
    return value
