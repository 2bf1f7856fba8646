"""Rate limits of each worker's requests to the coordinator, and protection against replayed requests.

The limits are per worker, so that one misbehaving pod does not block the job's other agents. Requests without the job's
token are rejected earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

RATE = 10.0
"""Sustained requests per second of an agent, which reports every two seconds and polls again after each answer."""
BURST = 40.0
MAX_OPEN_POLLS = 4
"""Polls of one worker that may be open at once: one, and broken connections that have not timed out yet."""


@dataclass(slots=True)
class _Sender:
    incarnation: int
    tokens_left: float
    """Requests it may make now."""
    refilled_at: float
    """When `tokens_left` was updated."""
    last_dates: dict[str, int]
    """Endpoint -> date of its last request."""


class RateLimiter:
    """Token buckets and last dates of the workers of one job. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._senders: dict[int, _Sender] = {}

    def delay_for(self, worker: int) -> float:
        """Count a request. Return 0 if it is allowed now, or the seconds after which it will be."""
        now = self._clock()
        sender = self._senders.setdefault(worker, _Sender(-1, BURST, now, {}))
        sender.tokens_left = min(BURST, sender.tokens_left + (now - sender.refilled_at) * RATE)
        sender.refilled_at = now
        if sender.tokens_left < 1.0:
            return (1.0 - sender.tokens_left) / RATE
        sender.tokens_left -= 1.0
        return 0.0

    def is_newer(self, endpoint: str, worker: int, incarnation: int, date: int) -> bool:
        """Whether the request is later than the last one of the same pod. A new incarnation starts again."""
        sender = self._senders.setdefault(worker, _Sender(-1, BURST, self._clock(), {}))
        if incarnation > sender.incarnation:
            sender.incarnation, sender.last_dates = incarnation, {}
        if incarnation == sender.incarnation:
            if date <= sender.last_dates.get(endpoint, 0):
                return False
            sender.last_dates[endpoint] = date
        return True
