"""Events for people: recorded in the background, counted up when they repeat."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

import aiohttp

from meshwright.local import clock
from meshwright.local.client import ApiClient, ApiError
from meshwright.local.resources import EVENTS, Object

logger = logging.getLogger(__name__)

_REMEMBERED = 2000


@dataclass(slots=True)
class _Posted:
    name: str
    namespace: str
    count: int


class EventRecorder:
    """Posts events of one component. `emit` never waits and never fails; `run` does the requests."""

    def __init__(self, client: ApiClient, component: str, host: str = "") -> None:
        self._client = client
        self._source = {"component": component, **({"host": host} if host else {})}
        self._queue: asyncio.Queue[tuple[Object, str, str, str]] = asyncio.Queue(maxsize=1000)
        self._posted: OrderedDict[tuple[str, str, str], _Posted] = OrderedDict()

    def emit(self, item: Object, kind: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        """Say what happened to an object. Dropped when a thousand others wait: events are no record of truth."""
        try:
            self._queue.put_nowait((item, kind, reason, message))
        except asyncio.QueueFull:
            logger.warning("event dropped: %s %s", reason, message)

    async def run(self) -> None:
        """Post until cancelled."""
        while True:
            item, kind, reason, message = await self._queue.get()
            try:
                await self._post(item, kind, reason, message)
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
                # Also the ordinary outcome in a namespace that is being deleted.
                logger.debug("event %s not posted: %s", reason, error)

    async def _post(self, item: Object, kind: str, reason: str, message: str) -> None:
        metadata = item["metadata"]
        key = (metadata["uid"], reason, message)
        known = self._posted.pop(key, None)
        if known is not None:
            known.count += 1
            body = {"count": known.count, "lastTimestamp": clock.now()}
            try:
                await self._client.patch(EVENTS, known.name, body, known.namespace)
            except ApiError as error:
                if error.status != 404:
                    raise
                known = None
        if known is None:
            known = await self._create(item, kind, reason, message)
        self._posted[key] = known
        while len(self._posted) > _REMEMBERED:
            self._posted.popitem(last=False)

    async def _create(self, item: Object, kind: str, reason: str, message: str) -> _Posted:
        metadata, moment = item["metadata"], clock.now()
        namespace = metadata.get("namespace") or "default"
        involved = {
            "apiVersion": item.get("apiVersion", "v1"),
            "kind": item.get("kind", ""),
            "name": metadata["name"],
            "uid": metadata["uid"],
            **({"namespace": metadata["namespace"]} if metadata.get("namespace") else {}),
            **({"resourceVersion": metadata["resourceVersion"]} if metadata.get("resourceVersion") else {}),
        }
        body = {
            "metadata": {"generateName": f"{metadata['name']}.", "namespace": namespace},
            "involvedObject": involved,
            "type": kind,
            "reason": reason,
            "message": message[:1024],
            "source": self._source,
            "firstTimestamp": moment,
            "lastTimestamp": moment,
            "count": 1,
        }
        created = await self._client.create(EVENTS, body)
        return _Posted(created["metadata"]["name"], namespace, 1)
