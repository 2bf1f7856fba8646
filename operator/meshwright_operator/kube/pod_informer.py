"""The watch of worker pods. Pods change by the thousand, so this module watches them; kopf watches jobs and nodes.

kopf creates a queue and a task for every object and processes each event in a dozen steps that the operator does not
need. With a thousand pods that took half of the operator's time. This module only parses each event and updates the
cache. The watch starts at the resourceVersion of the last listing. If that is too old, the pods are listed again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable

import aiohttp
import orjson

from meshwright.api.labels import LABEL_JOB
from meshwright.api.objects import KubeObject
from meshwright_operator.kube.client import ApiError, KubeClient
from meshwright_operator.kube.paths import pods_path
from meshwright_operator.kube.resync import Resync
from meshwright_operator.kube.watch_liveness import WatchLiveness
from meshwright_operator.kube.watches import EventHandlers

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 30.0
STABLE_SECONDS = 1.0
"""A watch that lasted this long has started successfully."""
GONE = 410

log = logging.getLogger(__name__)


class PodInformer:
    """Keeps the cached pods of one namespace, or of all, up to date."""

    def __init__(
        self,
        cluster: KubeClient,
        resync: Resync,
        handlers: EventHandlers,
        liveness: WatchLiveness,
        idle_seconds: float,
        namespace: str | None = None,
    ) -> None:
        self._client = cluster
        self._resync = resync
        self._handlers = handlers
        self._liveness = liveness
        self._idle_seconds = idle_seconds
        self._namespace = namespace
        self._path = pods_path(namespace)
        self._version = ""

    async def run(self) -> None:
        """Watch until cancelled, and reconnect after errors."""
        self._version = self._resync.pods_version(self._namespace)
        pause = FIRST_PAUSE_SECONDS
        while True:
            began = time.monotonic()
            try:
                if not self._version:
                    self._version = await self._resync.pods(self._namespace)
                async for event in self._events():
                    self._apply_event(event)
            except ApiError as error:
                log.info("pod watch ended", extra={"path": self._path, "error": str(error)})
                if error.code == GONE:
                    self._version = ""
            # Back off if the server ends every watch at once. Reconnect without delay if a watch lasted.
            pause = FIRST_PAUSE_SECONDS if time.monotonic() - began > STABLE_SECONDS else pause
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _events(self) -> AsyncIterator[KubeObject]:
        query = {
            "watch": "true",
            "labelSelector": LABEL_JOB,
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
        }
        async with self._client.stream(self._path, query, self._idle_seconds) as content:
            self._liveness.seen(self._path)
            async for line in split_lines(content, lambda: self._liveness.seen(self._path)):
                yield _event(line)

    def _apply_event(self, event: KubeObject) -> None:
        obj = event["object"]
        if event["type"] != "BOOKMARK":
            try:
                self._handlers.pod(event)
            except (AttributeError, KeyError, TypeError, ValueError):
                log.warning("ignoring a malformed pod object", exc_info=True)
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
