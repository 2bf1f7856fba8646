"""The pulse of the watches: when each of them last gave a sign of life, bookmarks and fresh connections included.

A watch that went half-open looks like a quiet one. kopf connects again when nothing arrived for a while and tells
nobody about bookmarks, so the bytes are noticed where they arrive: in the responses of the HTTP session kopf is given.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import aiohttp

from meshwright_operator.cluster import resource_of
from meshwright_operator.metrics import OperatorMetrics


class Pulse:
    """When the watch of each resource was last heard of.

    Args:
        metrics: told every sign of life.
        bound: seconds of silence after which a watch counts as stale.
    """

    def __init__(self, metrics: OperatorMetrics, bound: float) -> None:
        self._metrics = metrics
        self._bound = bound
        self._beats: dict[str, float] = {}

    def expect(self, watches: Iterable[str]) -> None:
        """From now on these must be heard of."""
        now = time.monotonic()
        self._beats = {watch: now for watch in watches}

    def beat(self, path: str) -> None:
        """The watch of this path gave a sign of life."""
        if path in self._beats:
            self._beats[path] = time.monotonic()
            self._metrics.last_contact.labels(resource_of(path)).set_to_current_time()

    def stale(self) -> list[str]:
        """Paths of the watches that have been silent for too long."""
        now = time.monotonic()
        return [watch for watch, beat in self._beats.items() if now - beat > self._bound]


class _Listened:
    """The body of a response that is read in chunks, each of which is a sign of life."""

    def __init__(self, content: aiohttp.StreamReader, pulse: Pulse, path: str) -> None:
        self._content = content
        self._pulse = pulse
        self._path = path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """As `aiohttp.StreamReader.iter_chunked`."""
        async for chunk in self._content.iter_chunked(size):
            self._pulse.beat(self._path)
            yield chunk


def listening_session(pulse: Pulse, headers: dict[str, str], ssl: Any) -> aiohttp.ClientSession:
    """An HTTP session whose watches feel for the pulse."""

    class Response(aiohttp.ClientResponse):
        async def start(self, connection: Any) -> aiohttp.ClientResponse:
            await super().start(connection)
            if self.status == 200 and self.url.query.get("watch") == "true":
                pulse.beat(self.url.path)
                self.content = _Listened(self.content, pulse, self.url.path)  # type: ignore[assignment]
            return self

    connector = aiohttp.TCPConnector(limit=0, ssl=ssl)
    return aiohttp.ClientSession(connector=connector, headers=headers, response_class=Response)
