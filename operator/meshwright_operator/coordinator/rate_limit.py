"""How much one worker's agent may ask of the coordinator, and that a request that was caught is not sent again.

Per worker, so that a pod that runs wild does not keep its job's other agents out. All of it comes from pods that hold
the job's token; what holds none never gets so far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

RATE = 10.0
"""Requests a second that an agent may make for long: it reports every two seconds, and polls as it is answered."""
BURST = 40.0
LARGEST_POLLS = 4
"""Polls of one worker that may be open at once: one, and those that the network has not yet found to be dead."""


@dataclass(slots=True)
class _Sender:
    incarnation: int
    tokens_left: float
    """Requests it may make now."""
    refilled_at: float
    """When `tokens_left` was counted."""
    last_dates: dict[str, int]
    """By endpoint, the time that its last request carries."""


class RateLimiter:
    """What each worker of one job has used up. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._senders: dict[int, _Sender] = {}

    def delay_for(self, worker: int) -> float:
        """Counts a request; seconds after which it may be made, 0 when it may be now."""
        now = self._clock()
        sender = self._senders.setdefault(worker, _Sender(-1, BURST, now, {}))
        sender.tokens_left = min(BURST, sender.tokens_left + (now - sender.refilled_at) * RATE)
        sender.refilled_at = now
        if sender.tokens_left < 1.0:
            return (1.0 - sender.tokens_left) / RATE
        sender.tokens_left -= 1.0
        return 0.0

    def is_newer(self, endpoint: str, worker: int, incarnation: int, date: int) -> bool:
        """Whether the request is later than the last one of the same pod. A pod's are later than its predecessor's."""
        sender = self._senders.setdefault(worker, _Sender(-1, BURST, self._clock(), {}))
        if incarnation > sender.incarnation:
            sender.incarnation, sender.last_dates = incarnation, {}
        if incarnation == sender.incarnation:
            if date <= sender.last_dates.get(endpoint, 0):
                return False
            sender.last_dates[endpoint] = date
        return True
