"""The bounds of an HTTP server, and the limit on this process's file descriptors."""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass

MAX_DESCRIPTORS = 1 << 20
"""The soft limit is raised to the hard limit, but not beyond this."""
RESERVED_DESCRIPTORS = 512
"""Descriptors that connections of clients never use: for the API server, the lease, logs and key files."""


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """What the clients of one server may use. A connection is verified by its first request with a valid signature."""

    total: int = 65_536
    """Open connections. Lowered to what the limit on file descriptors allows."""
    unverified: int = 1024
    """Open connections that are not verified. When there are more, the oldest one is closed."""
    unverified_per_source: int = 256
    """The same for one source address. Many agents may share one, behind a gateway."""
    rate: float = 500.0
    """New connections per second that are not verified later, from sources that verified none before."""
    burst: float = 2000.0
    """How many of them may come at once."""
    rate_per_source: float = 50.0
    """New connections per second of one source that are not verified later."""
    burst_per_source: float = 200.0
    """How many of them may come at once."""
    per_owner: int = 8
    """Open verified connections of one owner, which is a worker. When there are more, the oldest one is closed."""
    head_seconds: float = 10.0
    """Time for the TLS handshake and for the headers of a request, from their first byte, or from the connection."""
    head_bytes: int = 32 << 10
    """Bytes that are received before a request begins. Its body may be among them."""
    idle_seconds: float = 75.0
    """Time between two requests, and for the client to read an answer."""


CLOSE_REASONS = (
    *("source_rate", "rate", "total", "exhausted", "evicted", "owner"),
    *("head_timeout", "idle_timeout", "head_bytes", "handshake"),
)
"""Why a server refuses or closes connections."""

HEALTH_LIMITS = ConnectionLimits(
    total=256,
    unverified=256,
    unverified_per_source=64,
    rate=100.0,
    burst=300.0,
    rate_per_source=50.0,
    burst_per_source=200.0,
)
"""Limits of the server for health and metrics, to which a few clients connect."""


class TokenBucket:
    """Allows `rate` events per second on average, and `burst` at once."""

    __slots__ = ("_burst", "_left", "_rate", "_updated")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._left, self._updated = burst, now

    def take(self, now: float) -> float:
        """Count an event. Return 0 if it is allowed, or the seconds after which it will be."""
        self._refill(now)
        if self._left < 1.0:
            return (1.0 - self._left) / self._rate
        self._left -= 1.0
        return 0.0

    def give_back(self) -> None:
        """Take back the last event."""
        self._left = min(self._burst, self._left + 1.0)

    def is_full(self, now: float) -> bool:
        """Whether it has nothing to remember."""
        self._refill(now)
        return self._left >= self._burst

    def _refill(self, now: float) -> None:
        self._left = min(self._burst, self._left + max(0.0, now - self._updated) * self._rate)
        self._updated = now


class ByteBudget:
    """Bytes that may be in use at once."""

    def __init__(self, total: int) -> None:
        self.left = total

    def take(self, count: int) -> bool:
        """Reserve this many bytes. Return whether they are available."""
        if count > self.left:
            return False
        self.left -= count
        return True

    def give_back(self, count: int) -> None:
        """Release bytes that were reserved."""
        self.left += count


def raise_descriptor_limit() -> None:
    """Raise the soft limit on open files to the hard limit: many agents keep connections open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections_for_descriptors(total: int) -> int:
    """`total`, or fewer if the limit on open files leaves less for connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return total
    return max(1, min(total, soft - min(RESERVED_DESCRIPTORS, soft // 2)))
