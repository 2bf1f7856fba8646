"""The liveness of watches: when each one last received an event, a bookmark or a new connection.

A half-open connection looks like a watch without events, so every byte counts: the API server sends a bookmark every
minute.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from meshwright_operator.kube.paths import resource_of
from meshwright_operator.metrics.operator_metrics import OperatorMetrics


class WatchLiveness:
    """When the watch of each resource last received data.

    Args:
        metrics: Records the time of the last data.
        stale_after: Seconds without data after which a watch is stale.
    """

    def __init__(self, metrics: OperatorMetrics, stale_after: float) -> None:
        self._metrics = metrics
        self._stale_after = stale_after
        self._last_seen: dict[str, float] = {}

    def track(self, watches: Iterable[str]) -> None:
        """Track these watches from now on."""
        now = time.monotonic()
        self._last_seen = {watch: now for watch in watches}

    def seen(self, path: str) -> None:
        """Record that the watch with this path received data."""
        if path in self._last_seen:
            self._last_seen[path] = time.monotonic()
            self._metrics.last_contact.labels(resource_of(path)).set_to_current_time()

    def stale(self) -> list[str]:
        """Paths of the watches that have received no data for too long."""
        now = time.monotonic()
        return [watch for watch, seen in self._last_seen.items() if now - seen > self._stale_after]
