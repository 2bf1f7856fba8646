"""Writes to the report file of a user's command how far a load is, for the agent that reads it."""

from __future__ import annotations

import json
import os
from contextlib import suppress

from meshwright.api.labels import ENV_REPORT_FILE
from meshwright_worker.rank.task import Work


class ReportFile:
    """The file that the environment names. Without one, as outside a job, nothing is written."""

    def __init__(self) -> None:
        self._path = os.environ.get(ENV_REPORT_FILE, "")

    def at_work(self, work: Work | None = None) -> None:
        """Write a line. A load never fails or waits because of it: a pipe that nobody reads gets none."""
        if not self._path or work is None:
            return
        line = {"work": work.name, "done": work.done, "total": work.total, "seconds": work.seconds}
        with suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(descriptor, json.dumps(line).encode() + b"\n")
            finally:
                os.close(descriptor)
