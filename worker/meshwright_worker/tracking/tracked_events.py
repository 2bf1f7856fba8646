"""Rank 0's side: passes each step's numbers to the tracking process, without waiting for it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from meshwright.api.tracking import TrackingSpec
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.rank.task import RankEvents, RankTask, StepReport
from meshwright_worker.tracking.records import Start, step_record, tracking_directory

log = logging.getLogger(__name__)

PIPE_BYTES = 1 << 20
FIRST_PAUSE, MAX_PAUSE = 1.0, 60.0
"""Time before a process that has ended is started again. It doubles each time."""
CLOSE_SECONDS = 10.0
"""How long the end of a rank waits for the tracking process. It continues alone after that."""


class TrackingProcess:
    """The process, as rank 0 sees it. No method raises or waits, except `close`."""

    def __init__(self, start: Start) -> None:
        self._failures, self._warned = 0, set[str]()
        self._services = services_of(start.spec)
        self._process: subprocess.Popen[bytes] | None = None
        self._last_step = start.step
        self._pause, self._next = FIRST_PAUSE, 0.0
        self._begin(start)
        self._again = start.model_copy(update={"again": True})

    def _begin(self, start: Start) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "meshwright_worker.tracking"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            for pipe in (self._process.stdin, self._process.stdout):
                os.set_blocking(pipe.fileno(), False)
            fcntl.fcntl(self._process.stdin, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except OSError as error:
            self._failed(f"cannot start: {error}")
            self._end()
        self._send(start.model_dump_json())

    def send(self, report: StepReport, generation: int) -> None:
        """Pass the numbers of a step. If the process does not keep up or has ended, the step is left out and counted.

        A process that has ended, because memory ran out or a package crashed, is started again after a pause.
        """
        if self._process is None:
            if time.monotonic() < self._next:
                self._failures += 1
                return
            self._begin(self._again.model_copy(update={"step": self._last_step}))
        self._send(json.dumps(step_record(report, generation)))
        self._last_step = report.step

    def failures(self) -> int:
        """Return the number of failures since the last call. The first one of each tracker is logged."""
        self._read_failures()
        count, self._failures = self._failures, 0
        return count

    def _read_failures(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            try:
                content = os.read(self._process.stdout.fileno(), 1 << 16)
            except (BlockingIOError, ValueError, OSError):
                content = b""
            for line in content.splitlines():
                self._failed(*_failure(line.decode(errors="replace")))

    def close(self) -> None:
        """Let the process write what it has, for a limited time."""
        process = self._process
        if process is None or process.stdin is None:
            return
        try:
            process.stdin.close()
            process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._read_failures()
            self._failed(f"does not end within {CLOSE_SECONDS:.0f} s{self._asked()}")
        except OSError as error:
            self._failed(f"does not end: {error}")
        self._read_failures()

    def _send(self, line: str) -> None:
        if self._process is None or self._process.stdin is None:
            return
        try:
            # Up to PIPE_BUF bytes are written entirely or not at all.
            os.write(self._process.stdin.fileno(), line.encode() + b"\n")
        except BlockingIOError:
            self._failed(f"does not keep up{self._asked()}")
        except (OSError, ValueError) as error:
            self._failed(f"has ended: {error}")
            self._end()

    def _end(self) -> None:
        """The process has ended: take what it has reported, and leave tracking alone for a while."""
        self._read_failures()
        process, self._process = self._process, None
        if process is not None:
            # It may have closed its pipes, and wait for something else: nothing is left for it to do.
            process.kill()
            for pipe in filter(None, (process.stdin, process.stdout)):
                with suppress(OSError):
                    pipe.close()
        self._next = time.monotonic() + self._pause
        self._pause = min(MAX_PAUSE, 2 * self._pause)

    def _failed(self, reason: str, tracker: str = "") -> None:
        self._failures += 1
        if tracker in self._warned or (self._warned and not tracker):  # the process ends because of what it has named
            return
        self._warned.add(tracker)
        where = f"{self._services.get(tracker, tracker)}: " if tracker else ""
        log.warning("tracking failed; training continues. Further failures are only counted: %s%s", where, reason)

    def _asked(self) -> str:
        """What the process may wait for."""
        return f": does {' or '.join(self._services.values())} answer?" if self._services else ""


def services_of(spec: TrackingSpec) -> dict[str, str]:
    """The trackers that are services, by name, and how messages name them: an error of theirs does not name the server
    each time.
    """
    found = {}
    if spec.wandb is not None and not spec.wandb.offline:
        found["wandb"] = "wandb"
    if spec.mlflow is not None and spec.mlflow.uri is not None:
        scheme, slashes, rest = spec.mlflow.uri.partition("://")
        # A password before `@` belongs in no log.
        found["mlflow"] = f"mlflow ({scheme}{slashes}{rest.rpartition('@')[2]})"
    return found


def _failure(line: str) -> tuple[str, str]:
    """(reason, tracker) of a line that the process has written."""
    try:
        found = json.loads(line)
        return str(found["reason"]), str(found["tracker"])
    except (ValueError, TypeError, KeyError):
        return line, ""


class TrackedEvents:
    """Events of rank 0 that also pass each step to the tracking process."""

    def __init__(self, events: RankEvents, tracking: TrackingProcess, generation: int) -> None:
        self._events, self._tracking, self._generation = events, tracking, generation
        self.phase, self.running, self.checkpoint = events.phase, events.running, events.checkpoint
        self.stop_requested, self.at_work = events.stop_requested, events.at_work
        self.take_checkpoint_request, self.checkpoint_begun = events.take_checkpoint_request, events.checkpoint_begun

    def step(self, report: StepReport) -> None:
        """A step is complete."""
        self._tracking.send(report, self._generation)
        self._events.step(replace(report, tracking_failures=self._tracking.failures()))


@contextmanager
def tracked(task: RankTask[NativeRun], events: RankEvents, step: int) -> Iterator[RankEvents]:
    """Yield events that track the steps after `step`, if this is rank 0 of a job with trackers."""
    spec = task.run.training.tracking
    if spec is None or task.rank != 0 or task.checkpoint_dir is None:
        yield events
        return
    directory = tracking_directory(task.checkpoint_dir)
    tracking = TrackingProcess(
        Start(
            spec=spec,
            directory=str(directory),
            name=Path(task.checkpoint_dir).name,
            generation=task.generation,
            step=step,
            ranks=task.world_size,
            replicas=task.run.data_parallel,
        )
    )
    try:
        yield TrackedEvents(events, tracking, task.generation)
    finally:
        tracking.close()
