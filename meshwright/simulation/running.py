"""Arithmetic of one undisturbed stretch of training: which steps are done, saved and complete after some time.

Positions are seconds of training at full size. Checkpoints are saved at multiples of the interval, as the runtime does
(`checkpoint.everySteps`). No loop over saves: a stretch of a month costs as much as one of a minute.
"""

from __future__ import annotations

import math

_TOLERANCE = 1e-9


class Stretch:
    """Training from one position on, at one rate, without an interruption."""

    __slots__ = ("_distance", "_first", "_period", "begin", "interval", "rate", "stall")

    def __init__(self, begin: float, rate: float, interval: float, stall: float) -> None:
        """A stretch.

        Args:
            begin: Position at which it begins.
            rate: Position per second between saves.
            interval: Position between two saves. Infinite without checkpoints.
            stall: Seconds of a save for which training stands still.
        """
        self.begin, self.rate, self.interval, self.stall = begin, rate, interval, stall
        self._distance = self._to_first_save()
        self._first = self._distance / rate + stall
        self._period = interval / rate + stall

    def _to_first_save(self) -> float:
        """Position from the begin to the first save."""
        if math.isinf(self.interval):
            return math.inf
        rest = self.interval - math.fmod(self.begin, self.interval)
        return rest if rest > _TOLERANCE * self.interval else self.interval

    def saves(self, seconds: float) -> int:
        """Stalls that have ended after so many seconds."""
        return (
            0 if seconds < self._first or math.isinf(self._first) else 1 + int((seconds - self._first) / self._period)
        )

    def position(self, seconds: float) -> float:
        """Position after so many seconds."""
        saves = self.saves(seconds)
        if not saves:
            return self.begin + min(seconds * self.rate, self._distance)
        since = seconds - self._first - (saves - 1) * self._period
        return self.begin + self._distance + (saves - 1) * self.interval + min(since * self.rate, self.interval)

    def durable(self, seconds: float, lag: float) -> float | None:
        """Position of the newest checkpoint of this stretch that is complete `lag` seconds after its stall."""
        saves = self.saves(seconds - lag)
        return None if saves < 1 else self.begin + self._distance + (saves - 1) * self.interval

    def seconds_to(self, position: float) -> float:
        """Seconds until the training reaches a position. A save that begins there does not count."""
        distance = position - self.begin
        if distance <= self._distance or math.isinf(distance):
            return distance / self.rate
        saves = math.ceil((distance - self._distance) / self.interval - _TOLERANCE)
        return distance / self.rate + saves * self.stall
