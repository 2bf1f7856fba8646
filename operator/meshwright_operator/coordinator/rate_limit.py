"""Rate limits of each worker's requests to the coordinator, and protection against replayed requests.

The limits are per worker, so that one misbehaving pod does not block the job's other agents. Requests that are not
signed, and requests of pods that the job does not have, are rejected earlier. A replayed request does not count, so
that it uses up nothing of the worker's rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from meshwright.protocol.signing import MAX_COUNTER_STEP, Sender
from meshwright_operator.http.limits import TokenBucket

RATE = 10.0
"""Sustained requests per second of an agent, which reports every two seconds and polls again after each answer."""
BURST = 40.0
MAX_OPEN_POLLS = 4
"""Polls of one worker that may be open at once: one, and broken connections that have not timed out yet."""


URGENT_RATE = 0.5
URGENT_BURST = 40.0
"""Changes of a worker's state for which its job is reconciled at once. A start of a generation has about ten."""


@dataclass(slots=True)
class _Worker:
    bucket: TokenBucket
    urgent: TokenBucket
    pod: Sender | None = None
    last_counters: dict[str, int] = field(default_factory=dict)
    """Endpoint -> counter of the pod's last request."""


class RateLimiter:
    """Token buckets and last counters of the workers of one job. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._workers: dict[int, _Worker] = {}

    def delay_for(self, worker: int) -> float:
        """Count a request. Return 0 if it is allowed now, or the seconds after which it will be."""
        return self._worker(worker).bucket.take(self._clock())

    def may_hurry(self, worker: int) -> bool:
        """Count a change of the worker's state. Return whether its job is reconciled for it at once.

        Otherwise one pod, whose state goes back and forth with each request, would have the job's status written as
        often.
        """
        return self._worker(worker).urgent.take(self._clock()) == 0

    def is_next(self, endpoint: str, sender: Sender, counter: int) -> bool:
        """Whether a request comes after the last one of the pod, and record it.

        The sender must be a current pod of the job: a change of the pod starts again.
        """
        worker = self._worker(sender.worker)
        if worker.pod != sender:
            worker.pod, worker.last_counters = sender, {}
        last = worker.last_counters.get(endpoint, 0)
        if not last < counter <= last + MAX_COUNTER_STEP:
            return False
        worker.last_counters[endpoint] = counter
        return True

    def last_counter(self, endpoint: str, sender: Sender) -> int:
        """The counter of the pod's last request; 0 before its first."""
        worker = self._workers.get(sender.worker)
        return worker.last_counters.get(endpoint, 0) if worker is not None and worker.pod == sender else 0

    def _worker(self, index: int) -> _Worker:
        worker = self._workers.get(index)
        if worker is None:
            now = self._clock()
            urgent = TokenBucket(URGENT_RATE, URGENT_BURST, now)
            worker = self._workers[index] = _Worker(TokenBucket(RATE, BURST, now), urgent)
        return worker
