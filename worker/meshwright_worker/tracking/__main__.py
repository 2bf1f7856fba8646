"""The tracking process: reads records from stdin, and passes them to every tracker of the job.

It is a process of its own, so that imports, files and services of trackers take no time of a step. It reports each
failure as a line on stdout. A tracker that failed is left alone for a while, up to a minute, and then tried again.
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from meshwright_worker.evidence.masking import Masker
from meshwright_worker.tracking.json_lines import last_event
from meshwright_worker.tracking.records import LINES, Event, Start
from meshwright_worker.tracking.run_state import RunState
from meshwright_worker.tracking.sink import Sink

SINKS = {
    "jsonLines": ("meshwright_worker.tracking.json_lines", "JsonLines"),
    "tensorBoard": ("meshwright_worker.tracking.tensorboard_files", "TensorBoard"),
    "wandb": ("meshwright_worker.tracking.wandb_run", "Wandb"),
    "mlflow": ("meshwright_worker.tracking.mlflow_run", "Mlflow"),
}
SERVICES = ("wandb", "mlflow")
"""Trackers that may wait for a server. They are the last of `SINKS`, so that files are closed before."""
MAX_WAITING = 10_000
"""Steps that may wait for a service."""
LOCK_SECONDS = 60.0
"""How long a new process waits for that of the mesh generation before."""
MAX_PAUSE = 60.0
REPLICAS = "replicas"
"""The replicas of the last start, in `RunState`."""


class Tracker:
    """One tracker, which is opened with the first record and again after failures."""

    def __init__(self, name: str, start: Start, event: Event | None, report: Callable[[str, str], None]) -> None:
        self._name, self._start, self._event, self._report = name, start, event, report
        self._sink: Sink | None = None
        self._pause, self._next = 0.5, 0.0
        self._last: int | None = None
        """The last step that was written."""

    def open(self) -> bool:
        """Open the tracker, and write the event of this start. Return whether it is open."""
        if self._sink is None and time.monotonic() >= self._next:
            self._try(self._open)
        return self._sink is not None

    def step(self, record: dict[str, Any]) -> None:
        """Write a step, unless the tracker failed a short time ago."""
        if self.open() and time.monotonic() >= self._next:
            self._try(lambda: self._write(record))

    def close(self) -> None:
        """Close the tracker."""
        if self._sink is not None:
            self._try(self._sink.close)

    def _open(self) -> None:
        module, attribute = SINKS[self._name]
        start = self._start if self._last is None else self._start.model_copy(update={"step": self._last})
        sink: Sink = getattr(import_module(module), attribute)(start)
        if self._event is not None:
            sink.event(self._event)
        self._sink, self._event = sink, None

    def _write(self, record: dict[str, Any]) -> None:
        sink = self._sink
        assert sink is not None
        try:
            sink.step(record)
        except Exception:
            if self._name not in SERVICES:
                # A file is opened again: TensorBoard's writer, and a handle of a mount that was away, fail for good.
                self._sink = None
                with suppress(Exception):
                    sink.close()
            raise
        self._last = int(record["step"])

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
            self._pause = 0.5
        except Exception as error:
            # A tracker's library may raise anything, and training continues whatever it is.
            self._pause = min(MAX_PAUSE, 2 * self._pause)
            self._next = time.monotonic() + self._pause
            self._report(self._name, f"{type(error).__name__}: {error}")


class ServiceTracker:
    """A tracker in a thread of its own: files and other services do not wait for a server that does not answer."""

    def __init__(self, name: str, tracker: Tracker, report: Callable[[str, str], None]) -> None:
        self._name, self._tracker, self._report = name, tracker, report
        self._records: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def open(self) -> bool:
        """Begin to open the tracker."""
        self._thread.start()
        return True

    def step(self, record: dict[str, Any]) -> None:
        """Write a step when those before it are written."""
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._report(self._name, f"does not keep up: {MAX_WAITING:,} steps wait for it")

    def close(self) -> None:
        """Close the tracker when every step is written."""
        self._records.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._tracker.open()
        for record in iter(self._records.get, None):
            self._tracker.step(record)
        self._tracker.close()


def _tracker(
    name: str, start: Start, event: Event | None, report: Callable[[str, str], None]
) -> Tracker | ServiceTracker:
    tracker = Tracker(name, start, event, report)
    return ServiceTracker(name, tracker, report) if name in SERVICES else tracker


def wanted(start: Start) -> list[str]:
    """Return the names of the trackers that the job asks for."""
    spec = start.spec
    asked = {"jsonLines": spec.json_lines, "tensorBoard": spec.tensor_board, "wandb": spec.wandb, "mlflow": spec.mlflow}
    return [name for name in SINKS if asked[name]]


def event_of(start: Start) -> Event | None:
    """Return the event of this start: the first one, a restart, or one with another number of replicas. None if only
    this process starts again.
    """
    if start.again:
        return None
    kind = "Start" if start.generation == 1 else "Restart"
    if start.generation > 1 and _replicas_before(start) not in (None, start.replicas):
        kind = "Rescale"
    return Event(start.step, kind, start.generation, start.ranks, start.replicas)


def _replicas_before(start: Start) -> int | None:
    """The replicas that trained the step before this start; without `steps.jsonl`, those of the last start."""
    before = last_event(Path(start.directory) / LINES, start.step)
    return before.replicas if before is not None else RunState(start.directory).get(REPLICAS)


def run(lines: TextIO, report: Callable[[str, str], None]) -> None:
    """Track until `lines` end."""
    start = Start.model_validate_json(lines.readline())
    directory = Path(start.directory)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        if not _locked(lock):
            report("lock", "the tracking process of the last start still writes; it may be on a lost node")
        event = event_of(start)
        with suppress(OSError):  # services may work without files
            RunState(start.directory).put(REPLICAS, start.replicas)
        trackers = [_tracker(name, start, event, report) for name in wanted(start)]
        for tracker in trackers:
            tracker.open()
        for line in lines:
            if line.endswith("\n"):
                record = json.loads(line)
                for tracker in trackers:
                    tracker.step(record)
        for tracker in trackers:
            tracker.close()


def _locked(file: TextIO) -> bool:
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.1)
        else:
            return True


def main() -> None:
    """Run with the process's pipes. What libraries print goes to stderr."""
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    masker, reporting = Masker(os.environ), threading.Lock()

    def report(name: str, reason: str) -> None:
        """A library's error may repeat an address with its password, or a token: the rank logs it."""
        line = json.dumps({"tracker": name, "reason": masker.mask(reason)[:500]}) + "\n"
        with reporting:
            reports.write(line)
            reports.flush()

    try:
        run(sys.stdin, report)
    except Exception as error:
        report("process", f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main()
