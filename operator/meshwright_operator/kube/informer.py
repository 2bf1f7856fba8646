"""Watches: of jobs, nodes and worker pods, one connection each.

A watch only parses each event and passes it on. It starts at the resourceVersion of the last listing, so nothing is
missed and nothing is listed twice. If that is too old, the collection is listed again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import aiohttp
import orjson

from meshwright.api.objects import KubeObject
from meshwright_operator.kube.client import ApiError, KubeClient
from meshwright_operator.kube.watch_liveness import WatchLiveness

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 30.0
STABLE_SECONDS = 1.0
"""A watch that lasted this long has started successfully."""
GONE = 410

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A collection to watch."""

    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    """What selects its objects."""
    listed_version: Callable[[], str]
    """The resourceVersion of the last listing; empty without one."""
    relist: Callable[[], Awaitable[str]]
    """Lists the collection again, and returns the resourceVersion of the list."""
    apply: Callable[[KubeObject], None]
    """Handles an event."""


class Informer:
    """Keeps the cached objects of one collection up to date."""

    def __init__(self, cluster: KubeClient, watched: Watched, liveness: WatchLiveness, idle_seconds: float) -> None:
        """A watch reconnects if nothing arrives for `idle_seconds`, not even a bookmark."""
        self._client = cluster
        self._watched = watched
        self._liveness = liveness
        self._idle_seconds = idle_seconds
        self._version = ""
        self.connected = asyncio.Event()
        """Set when the API server has accepted the watch for the first time."""

    async def run(self) -> None:
        """Watch until cancelled, and reconnect after errors."""
        self._version = self._watched.listed_version()
        pause = FIRST_PAUSE_SECONDS
        while True:
            lasted, asked = await self._watch()
            # Back off if the server ends every watch at once, however long the listings between them take: to list tens
            # of thousands of objects again and again would keep a restarted server busy. Reconnect without delay if a
            # watch lasted.
            pause = FIRST_PAUSE_SECONDS if lasted > STABLE_SECONDS else pause
            await asyncio.sleep(max(pause * random.uniform(0.8, 1.2), min(asked, LONGEST_PAUSE_SECONDS)))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _watch(self) -> tuple[float, float]:
        """Watch until the watch ends. Return for how long it was, and the pause in seconds that the server asks for."""
        began, asked = math.inf, 0.0
        try:
            if not self._version:
                self._version = await self._watched.relist()
            began = time.monotonic()
            async for event in self._events():
                self._apply_event(event)
        except ApiError as error:
            log.info("watch ended", extra={"path": self._watched.path, "error": str(error)})
            if error.code == GONE:
                self._version = ""
            asked = error.retry_after or 0.0
        return time.monotonic() - began, asked

    async def _events(self) -> AsyncIterator[KubeObject]:
        path = self._watched.path
        query = {
            **self._watched.query,
            "watch": "true",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
        }
        async with self._client.stream(path, query, self._idle_seconds) as content:
            self._liveness.seen(path)
            self.connected.set()
            async for line in split_lines(content, lambda: self._liveness.seen(path)):
                yield _event(line)

    def _apply_event(self, event: KubeObject) -> None:
        obj = event["object"]
        if event["type"] != "BOOKMARK":
            try:
                self._watched.apply(event)
            except (AttributeError, KeyError, TypeError, ValueError):
                log.warning("ignoring a malformed object", extra={"path": self._watched.path}, exc_info=True)
        self._version = obj["metadata"]["resourceVersion"]


def _event(line: bytes) -> KubeObject:
    """Parse one line of a watch.

    Raises:
        ApiError: The server reports an error, or the line is not a watch event.
    """
    try:
        event: KubeObject = orjson.loads(line)
        obj = event["object"]
        if event["type"] != "ERROR":
            obj["metadata"]["resourceVersion"]
            return event
        error = ApiError(int(obj.get("code") or 0), str(obj.get("reason", "")), str(obj.get("message", "")))
    except (AttributeError, KeyError, TypeError, ValueError) as malformed:
        raise ApiError(0, "InvalidEvent", f"not a watch event: {malformed!r}") from None
    raise error


async def split_lines(content: aiohttp.StreamReader, on_data: Callable[[], None]) -> AsyncIterator[bytes]:
    """Split a body into lines of any length. Calls `on_data` for every chunk that arrives."""
    partial: list[bytes] = []
    async for chunk in content.iter_any():
        on_data()
        *complete, rest = chunk.split(b"\n")
        for line in complete:
            yield b"".join([*partial, line])
            partial.clear()
        if rest:
            partial.append(rest)
