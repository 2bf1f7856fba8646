"""Finds step and loss in the log of a user's command.

The patterns may be the user's, and a pattern may take exponential time on some lines. So lines are cut, each search has
a deadline, and a pattern that misses it several times is not used any more.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence

import regex

from meshwright.api.progress_patterns import DEFAULT_PATTERNS
from meshwright_worker.command.report_line import MAX_NUMBER, ReportedStep

log = logging.getLogger(__name__)

MAX_SEARCHED = 1024
"""Characters of a line that are searched."""
_COLORS = re.compile(r"\x1b\[[0-9;]{0,16}m")
"""Escape sequences of terminals: torchtitan colors its lines."""
DEADLINE_SECONDS = 0.02
MAX_TIMEOUTS = 3


class LogPatterns:
    """Reads the progress of one rank from its log. A line may have only the loss: then it is that of the last step."""

    def __init__(self, patterns: Sequence[str] | None) -> None:
        """`patterns` are those of the job, or None for the default ones."""
        chosen = DEFAULT_PATTERNS if patterns is None else patterns
        self._patterns = [compiled for pattern in chosen if (compiled := _compile(pattern)) is not None]
        self._timeouts: dict[str, int] = {}
        self._fixes_total = patterns is None
        self._total: int | None = None
        self._step: int | None = None

    def read(self, line: str) -> ReportedStep | None:
        """The progress that a line of the log reports, or None."""
        line = _COLORS.sub("", line[: 2 * MAX_SEARCHED])
        for pattern in list(self._patterns):
            try:
                match = pattern.search(line[:MAX_SEARCHED], timeout=DEADLINE_SECONDS)
            except TimeoutError:
                self._count_timeout(pattern)
                continue
            if match is not None:
                return self._progress(match.groupdict())
        return None

    def _progress(self, found: dict[str, str | None]) -> ReportedStep | None:
        step, total = _count(found.get("step")), _count(found.get("total_steps"))
        epoch = _count(found.get("epoch"))
        if epoch is not None and step is not None and total is not None:
            step, total = epoch * total + step, None
        if self._fixes_total and total is not None:
            # The bars of evaluations and data sets look like that of the training, which comes first.
            self._total = self._total or total
            if total != self._total:
                return None
        self._step = step if step is not None else self._step
        if self._step is None:
            return None
        loss, rate = _number(found.get("loss")), _number(found.get("learning_rate"))
        return ReportedStep(self._step, loss, _count(found.get("tokens")), rate, total)

    def _count_timeout(self, pattern: regex.Pattern[str]) -> None:
        count = self._timeouts[pattern.pattern] = self._timeouts.get(pattern.pattern, 0) + 1
        if count >= MAX_TIMEOUTS:
            self._patterns.remove(pattern)
            log.warning("a pattern of `runtime.progress` takes too long and is not used any more: %s", pattern.pattern)


def _compile(pattern: str) -> regex.Pattern[str] | None:
    try:
        return regex.compile(pattern, regex.IGNORECASE | regex.VERSION0)
    except regex.error as error:
        log.warning("a pattern of `runtime.progress` is invalid and is not used: %s: %s", pattern, error)
        return None


def _count(text: str | None) -> int | None:
    digits = (text or "").replace(",", "")
    return int(digits) if digits.isdecimal() and len(digits) < len(str(MAX_NUMBER)) else None


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text else None
    except ValueError:
        return None
    return value if value is None or math.isfinite(value) else math.nan
