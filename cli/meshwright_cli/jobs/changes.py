"""What to print while a job, or a list of jobs, is watched: each change once. Pure.

The operator writes a job's status every 10 s while it trains, less often if hundreds of jobs do, and for reasons that
no row or line shows. A watch must neither repeat a row nor fill the terminal with steps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from meshwright_cli.client.objects import Job
from meshwright_cli.jobs.list_view import CHANGING

PROGRESS_SECONDS = 60.0
"""Time between two lines about progress only."""
PROGRESS_PARTS = 20
"""A line about progress also when this part of all steps is done: every 5%."""
_WORK = re.compile(r"/s on worker \d")
"""In a sentence such as `Tokenizing the data: 41% of 12 GB at 25 MB/s on worker 0`."""


def change_line(job: Job | None) -> str:
    """A job's state in one line."""
    if job is None:
        return "deleted"
    steps = f"step {job.status.step:,}" if job.status.step else ""
    if job.state == "Running" and job.status.total_steps:
        return f"Running: {steps or 'step 0'} of {job.status.total_steps:,}"
    return f"{job.state}: {job.message}".rstrip(": ") if job.status.conditions else job.state


def _without_work(text: str) -> str:
    """A job's message without how far its work is before the first step, which changes every 10 s."""
    return ". ".join(sentence for sentence in text.split(". ") if not _WORK.search(sentence))


class ChangeLines:
    """Lines about one job: at once when its state changes, and from time to time while it trains or tokenizes."""

    def __init__(self) -> None:
        self._state = ""
        self._line = ""
        self._step = 0
        self._time = 0.0

    def line(self, job: Job | None, now: float) -> str | None:
        """The line to print, or None if the last one still says enough.

        Args:
            job: the job as it is; None once it is deleted.
            now: monotonic time in seconds.
        """
        line = change_line(job)
        trains = job is not None and job.state == "Running"
        state = "Running" if trains else _without_work(line)
        if line == self._line or (state == self._state and not self._advanced(job, now)):
            return None
        self._state, self._line, self._time = state, line, now
        self._step = (job.status.step or 0) if job is not None else 0
        return line

    def _advanced(self, job: Job | None, now: float) -> bool:
        """Whether enough has happened since the last line: time, a part of the steps, or the last of them."""
        status = job.status if job is not None else None
        step, total = (status.step or 0, status.total_steps or 0) if status is not None else (0, 0)
        part = total / PROGRESS_PARTS
        return now - self._time >= PROGRESS_SECONDS or step - self._step >= part > 0 or step >= total > 0


class ChangedRows:
    """Rows of jobs, each printed when a column of it changes that is not a time."""

    def __init__(self, header: Sequence[str]) -> None:
        self._header = tuple(header)
        self._widths = [len(name) for name in header]
        self._shown: dict[tuple[str, str], tuple[str, ...]] = {}

    def lines(self, key: tuple[str, str], row: Sequence[str] | None) -> list[str]:
        """The line of a job whose row has changed, with the header before the first; none if it has not.

        Args:
            key: namespace and name.
            row: its cells; None once the job is deleted.
        """
        first = not self._shown
        before = self._shown.get(key)
        if row is None:
            if before is None:
                return []
            del self._shown[key]
            row = tuple(
                "Deleted" if column == "STATUS" else cell for column, cell in zip(self._header, before, strict=True)
            )
        else:
            self._shown[key] = tuple(row)
            if before is not None and self._lasting(before) == self._lasting(row):
                return []
        cells = [cell or "-" for cell in row]
        self._widths = [max(width, len(cell)) for width, cell in zip(self._widths, cells, strict=True)]
        return [self._aligned(self._header)] * first + [self._aligned(cells)]

    def _lasting(self, row: Sequence[str]) -> tuple[str, ...]:
        lasting = [cell for column, cell in zip(self._header, row, strict=True) if column not in CHANGING]
        return tuple(map(_without_work, lasting))

    def _aligned(self, cells: Sequence[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(cells, self._widths, strict=True)).rstrip()
