"""Loss and throughput of a run over its steps: from the tracker's JSON-lines file, or from statuses seen so far."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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

    def with_point(self, point: Point) -> History:
        """Return a history that ends with this step. Steps from it on are replaced: a restart repeats them."""
        kept = [one for one in self.points if one.step < point.step]
        return History((*kept, point), self.marks)

    def with_marks(self, marks: Iterable[Mark]) -> History:
        """Return a history with further marks."""
        return History(self.points, tuple(dict.fromkeys((*self.marks, *marks))))


def read_history(path: Path) -> History:
    """Read the file that a job with `training.tracking.jsonLines` writes.

    Raises:
        HistoryFileError: it cannot be read, or a line is not an object with a step. A last line that is cut is ignored.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise HistoryFileError(f"{path}: must be at most {MAX_FILE_BYTES >> 20} MiB")
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise HistoryFileError(f"{path}: {error.strerror}") from error
    points: dict[int, Point] = {}
    marks: list[Mark] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = _record(path, number, line, last=number == len(lines))
        if record is None:
            break
        step = record["step"]
        if "event" in record:
            marks.append(Mark(step, str(record["event"]), str(record.get("cause") or record.get("note") or "")))
        else:
            points[step] = _point(record)
    return History([points[step] for step in sorted(points)], sorted(marks, key=lambda mark: mark.step))


def _record(path: Path, number: int, line: str, *, last: bool) -> dict[str, Any] | None:
    """A line's record, or None for a last line that is not complete."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        if last:
            return None
        raise HistoryFileError(f"{path}: line {number}: not valid JSON: {error}") from error
    step = record.get("step") if isinstance(record, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise HistoryFileError(f"{path}: line {number}: `step` must be a whole number, at least 0")
    return dict(record)


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
