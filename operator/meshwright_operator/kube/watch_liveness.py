"""The liveness of watches: when each one last received an event, a bookmark or a new connection.

A half-open connection looks like a watch without events. kopf reconnects an idle watch but does not report bookmarks,
so this module observes the bytes in the responses of kopf's HTTP session.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import aiohttp

from meshwright_operator.kube.paths import resource_of
from meshwright_operator.operator_metrics import OperatorMetrics


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
        if path not in self._last_seen:
            return
        now, resource = time.monotonic(), resource_of(path)
        self._last_seen[path] = now
        # Each namespace has a watch of its own. One that is stale must not be hidden by another.
        oldest = min(seen for watch, seen in self._last_seen.items() if resource_of(watch) == resource)
        self._metrics.last_contact.labels(resource).set(time.time() - (now - oldest))

    def stale(self) -> list[str]:
        """Paths of the watches that have received no data for too long."""
        now = time.monotonic()
        return [watch for watch, seen in self._last_seen.items() if now - seen > self._stale_after]


class _MonitoredBody:
    """The body of a watch's response. Records every chunk that is read."""

    def __init__(self, content: aiohttp.StreamReader, liveness: WatchLiveness, path: str) -> None:
        self._content = content
        self._liveness = liveness
        self._path = path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """As `aiohttp.StreamReader.iter_chunked`."""
        async for chunk in self._content.iter_chunked(size):
            self._liveness.seen(self._path)
            yield chunk


def monitored_session(liveness: WatchLiveness, headers: dict[str, str], ssl: Any) -> aiohttp.ClientSession:
    """An HTTP session that records the liveness of its watches."""

    class Response(aiohttp.ClientResponse):
        async def start(self, connection: Any) -> aiohttp.ClientResponse:
            await super().start(connection)
            if self.status == 200 and self.url.query.get("watch") == "true":
                liveness.seen(self.url.path)
                self.content = _MonitoredBody(self.content, liveness, self.url.path)  # type: ignore[assignment]
            return self

    connector = aiohttp.TCPConnector(limit=0, ssl=ssl)
    return aiohttp.ClientSession(connector=connector, headers=headers, response_class=Response)
