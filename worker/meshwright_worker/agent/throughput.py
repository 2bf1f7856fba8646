"""Recent training speed, averaged over a window of steps so that one slow step has little effect."""

from __future__ import annotations

from collections import deque

WINDOW = 20


class Throughput:
    """Mean step time and tokens per second over the last steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float]] = deque(maxlen=WINDOW)

    def add(self, tokens: int, seconds: float) -> None:
        """Add one step that processed `tokens` tokens over the entire job in `seconds`."""
        self._steps.append((tokens, seconds))

    @property
    def step_seconds(self) -> float:
        """Mean time of a step; 0 before the first step."""
        return sum(seconds for _, seconds in self._steps) / len(self._steps) if self._steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the entire job; 0 before the first step."""
        seconds = sum(seconds for _, seconds in self._steps)
        return sum(tokens for tokens, _ in self._steps) / seconds if seconds > 0 else 0.0
