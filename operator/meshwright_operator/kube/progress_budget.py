"""How many writes of jobs' progress the operator sends in all: a token bucket that serves the oldest progress first.

A job asks before each write that only updates progress. While tokens last, it writes at once. Otherwise it waits among
the others, in the order in which their progress was last written, and asks again when its turn should come. A job that
stops asking, because nobody reconciles it, loses its place, so that its token goes to others. Writes that say something
new do not ask.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable

PROGRESS_WRITES_PER_SECOND = 20.0
"""Jobs that train write every ten seconds: up to 200 of them need not wait."""
ASK_AGAIN_SECONDS = 10.0
"""A waiting job asks at least this often."""
SILENT_SECONDS = 3 * ASK_AGAIN_SECONDS
"""A job that has not asked for this long has lost its place."""
_ROUNDING = 1e-6


class ProgressBudget:
    """The writes of progress that all jobs share. Used from one event loop only.

    Args:
        per_second: Writes per second on average. As many may be sent at once after a pause of a second.
        clock: Seconds on a monotonic clock.
    """

    def __init__(
        self, per_second: float = PROGRESS_WRITES_PER_SECOND, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = per_second
        self._most = max(1.0, per_second)
        self._clock = clock
        self._tokens = self._most
        self._filled = clock()
        self._waiting: list[tuple[float, int, str]] = []
        """(When the progress was last written, number, uid), oldest first."""
        self._places: dict[str, tuple[float, int, str]] = {}
        self._asked: dict[str, float] = {}
        self._number = 0

    def __len__(self) -> int:
        """The number of jobs whose progress waits."""
        return len(self._waiting)

    def ask(self, uid: str, written: float) -> float:
        """Take a token for a job's progress, last written at `written`. Return 0, or the seconds until it asks again.

        The result never is 0 while the tokens are needed for jobs that wait with older progress.
        """
        now = self._clock()
        self._tokens = min(self._most, self._tokens + self._rate * (now - self._filled))
        self._filled = now
        place = self._place(uid, written)
        self._asked[uid] = now
        while now - self._asked[self._waiting[0][2]] > SILENT_SECONDS:
            self.withdraw(self._waiting[0][2])
        needed = 1 + bisect_left(self._waiting, place)
        if needed > self._tokens + _ROUNDING:
            return min(ASK_AGAIN_SECONDS, (needed - self._tokens) / self._rate)
        self._tokens -= 1
        self.withdraw(uid)
        return 0.0

    def withdraw(self, uid: str) -> None:
        """Give up a job's place: its progress was written with something else, or there is none any more."""
        place = self._places.pop(uid, None)
        if place is not None:
            del self._waiting[bisect_left(self._waiting, place)]
            del self._asked[uid]

    def _place(self, uid: str, written: float) -> tuple[float, int, str]:
        """The job's place among those that wait. Of two that were never written, the first to ask is the older one."""
        if uid not in self._places:
            self._number += 1
            self._places[uid] = written, self._number, uid
            insort(self._waiting, self._places[uid])
        return self._places[uid]
