"""The pulse of the watches: when each of them last gave a sign of life, bookmarks and fresh connections included.

A watch that went half-open looks like a quiet one. kopf connects again when nothing arrived for a while and tells
nobody about bookmarks, so the bytes are noticed where they arrive: in the responses of the HTTP session kopf is given.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import aiohttp

from meshwright_operator.kube.paths import resource_of
from meshwright_operator.metrics.operator_metrics import OperatorMetrics


class WatchLiveness:
    """When the watch of each resource was last heard of.

    Args:
        metrics: told every sign of life.
        stale_after: seconds of silence after which a watch counts as stale.
    """

    def __init__(self, metrics: OperatorMetrics, stale_after: float) -> None:
        self._metrics = metrics
        self._stale_after = stale_after
        self._last_seen: dict[str, float] = {}

    def track(self, watches: Iterable[str]) -> None:
        """From now on these must be heard of."""
        now = time.monotonic()
        self._last_seen = {watch: now for watch in watches}

    def seen(self, path: str) -> None:
        """The watch of this path gave a sign of life."""
        if path in self._last_seen:
            self._last_seen[path] = time.monotonic()
            self._metrics.last_contact.labels(resource_of(path)).set_to_current_time()

    def stale(self) -> list[str]:
        """Paths of the watches that have been silent for too long."""
        now = time.monotonic()
        return [watch for watch, seen in self._last_seen.items() if now - seen > self._stale_after]


class _MonitoredBody:
    """The body of a response that is read in chunks, each of which is a sign of life."""

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
    """An HTTP session whose watches feel for the pulse."""

    class Response(aiohttp.ClientResponse):
        async def start(self, connection: Any) -> aiohttp.ClientResponse:
            await super().start(connection)
            if self.status == 200 and self.url.query.get("watch") == "true":
                liveness.seen(self.url.path)
                self.content = _MonitoredBody(self.content, liveness, self.url.path)  # type: ignore[assignment]
            return self

    connector = aiohttp.TCPConnector(limit=0, ssl=ssl)
    return aiohttp.ClientSession(connector=connector, headers=headers, response_class=Response)
