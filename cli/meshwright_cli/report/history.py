"""Loss and throughput of a run over its steps: from the tracker's JSON-lines file, or from statuses seen so far."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 512 << 20


class HistoryFileError(ValueError):
    """The file is not a tracker's JSON-lines file. The message names the file and the line."""


@dataclass(frozen=True, slots=True)
class Point:
    """One step."""

    step: int
    loss: float | None = None
    tokens_per_second: float | None = None
    evaluation_loss: float | None = None
    learning_rate: float | None = None
    step_seconds: float | None = None
    bubble: float | None = None
    """Part of the step in which the pipeline's ranks wait, from measured times of passes."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A restart or a resize, after a step."""

    step: int
    name: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class History:
    """The steps of a run in order, each once, and what happened between them."""

    points: Sequence[Point] = ()
    marks: Sequence[Mark] = ()
    note: str = ""
    """Lines of the file that are left out."""

    def with_point(self, point: Point) -> History:
        """Return a history that ends with this step. Steps from it on are replaced: a restart repeats them."""
        kept = [one for one in self.points if one.step < point.step]
        return replace(self, points=(*kept, point))

    def with_marks(self, marks: Iterable[Mark]) -> History:
        """Return a history with further marks."""
        return replace(self, marks=tuple(dict.fromkeys((*self.marks, *marks))))


def read_history(path: Path) -> History:
    """Read the file that a job with `training.tracking.jsonLines` writes. A line that is no record, such as what the
    crash of a node has left, is left out, and so is a last line that is cut.

    Raises:
        HistoryFileError: it cannot be read, or has lines and none is an object with a step.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise HistoryFileError(f"{path}: must be at most {MAX_FILE_BYTES >> 20} MiB")
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise HistoryFileError(f"{path}: {error.strerror}") from error
    points: dict[int, Point] = {}
    marks: list[Mark] = []
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        found = _record(line)
        if isinstance(found, str):
            if number < len(lines):
                problems.append(f"line {number}: {found}")
            continue
        step = found["step"]
        if "event" in found:
            marks.append(Mark(step, str(found["event"]), str(found.get("cause") or found.get("note") or "")))
        else:
            points[step] = _point(found)
    if problems and not points and not marks:
        raise HistoryFileError(f"{path}: {problems[0]}")
    ordered = [points[step] for step in sorted(points)]
    return History(ordered, sorted(marks, key=lambda mark: mark.step), _note(path, problems))


def _record(line: str) -> dict[str, Any] | str:
    """A line's record, or why it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"not valid JSON: {error}"
    step = record.get("step") if isinstance(record, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        return "`step` must be a whole number, at least 0"
    return dict(record)


def _note(path: Path, problems: Sequence[str]) -> str:
    """What is said of the lines that are no records."""
    if not problems:
        return ""
    what = f"{len(problems)} lines that are no records are" if len(problems) > 1 else "a line that is no record is"
    return f"{path}: {what} left out; {problems[0]}"


def _point(record: dict[str, Any]) -> Point:
    return Point(
        step=record["step"],
        loss=_number(record.get("loss")),
        tokens_per_second=_number(record.get("tokensPerSecond")),
        evaluation_loss=_number(record.get("evaluationLoss")),
        learning_rate=_number(record.get("learningRate")),
        step_seconds=_number(record.get("stepSeconds")),
        bubble=_number(record.get("pipelineBubble")),
    )


def _number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
