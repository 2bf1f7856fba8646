"""`steps.jsonl`: one JSON object per line, for a step or an event. Steps after the checkpoint are cut at a restart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshwright_worker.tracking.records import LINES, Event, Start
from meshwright_worker.tracking.sink import Sink


class JsonLines(Sink):
    """The file of plain JSON lines. Each line is written at once."""

    def __init__(self, start: Start) -> None:
        path = Path(start.directory) / LINES
        cut_after(path, start.step)
        self._file = path.open("a", encoding="utf-8")

    def step(self, record: dict[str, Any]) -> None:
        """Append a line."""
        self._write(record)

    def event(self, event: Event) -> None:
        """Append a line."""
        self._write(asdict(event))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()


def last_event(path: Path, step: int) -> Event | None:
    """Return the last event up to a step, or None if there is none."""
    found = None
    for _, record in _records(path):
        if record["step"] > step:
            break
        if "event" in record:
            found = Event(**{name: record[name] for name in Event.__slots__})
    return found


def cut_after(path: Path, step: int) -> None:
    """Remove everything from the first record after `step` on, and what is no record at the end."""
    if not path.exists():
        return
    end = 0
    for stop, record in _records(path):
        if record["step"] > step:
            break
        end = stop
    with path.open("r+b") as file:
        file.truncate(end)


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(position after it, record) of each line that is a record. One that is not, such as what the crash of a node has
    left, costs none of those behind it.
    """
    if not path.exists():
        return
    position = 0
    with path.open("rb") as file:
        for line in file:
            position += len(line)
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if line.endswith(b"\n") and isinstance(record, dict) and isinstance(record.get("step"), int):
                yield position, record
