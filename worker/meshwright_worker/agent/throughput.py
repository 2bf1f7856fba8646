"""Recent speed of training, smoothed over a window of steps so that one slow step does not shake the estimate."""

from __future__ import annotations

from collections import deque

WINDOW = 20


class Throughput:
    """Mean step time and tokens per second of the last steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=WINDOW)

    def add(self, tokens: int, seconds: float) -> None:
        """Count one step of `tokens` tokens over the whole job that took `seconds`."""
        self._steps.append((tokens, seconds))

    @property
    def step_seconds(self) -> float:
        """Mean time of a step; 0 before the first."""
        return sum(seconds for _, seconds in self._steps) / len(self._steps) if self._steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole job; 0 before the first step."""
        seconds = sum(seconds for _, seconds in self._steps)
        return sum(tokens for tokens, _ in self._steps) / seconds if seconds > 0 else 0.0
