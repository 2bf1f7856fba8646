"""Kubernetes Events: posted in the background; a repetition increments the count."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import Literal

from meshwright.api.objects import KubeObject
from meshwright_local.kube import timestamps
from meshwright_local.kube.client import REQUEST_ERRORS, ApiClient, ApiError
from meshwright_local.kube.resources import EVENTS

logger = logging.getLogger(__name__)


class EventRecorder:
    """Posts events of one component. `emit` never waits and never fails; `run` sends the requests."""

    def __init__(self, client: ApiClient, component: str, host: str = "") -> None:
        self._client = client
        self._source = {"component": component, **({"host": host} if host else {})}
        self._queue: asyncio.Queue[tuple[KubeObject, str, str, str]] = asyncio.Queue(maxsize=1000)

    def emit(self, item: KubeObject, kind: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        """Queue an event about an object. Drops it if 1,000 others wait."""
        try:
            self._queue.put_nowait((item, kind, reason, message))
        except asyncio.QueueFull:
            logger.warning("event dropped: %s %s", reason, message)

    async def run(self) -> None:
        """Post queued events until cancelled."""
        while True:
            item, kind, reason, message = await self._queue.get()
            try:
                await self._post(item, kind, reason, message)
            except REQUEST_ERRORS as error:
                # This is expected in a namespace that is being deleted.
                logger.debug("event %s not posted: %s", reason, error)

    async def _post(self, item: KubeObject, kind: str, reason: str, message: str) -> None:
        """Create the event. Its name is a hash of its content, so a repetition finds it and increments its count."""
        metadata, moment = item["metadata"], timestamps.now()
        digest = hashlib.sha256(repr((metadata["uid"], self._source, reason, message)).encode()).hexdigest()
        name, namespace = f"{metadata['name']}.{digest[:16]}", metadata.get("namespace") or "default"
        known = ("name", "namespace", "uid", "resourceVersion")
        body = {
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": {
                "apiVersion": item.get("apiVersion", "v1"),
                "kind": item.get("kind", ""),
                **{field: metadata[field] for field in known if metadata.get(field)},
            },
            "type": kind,
            "reason": reason,
            "message": message[:1024],
            "source": self._source,
            "firstTimestamp": moment,
            "lastTimestamp": moment,
            "count": 1,
        }
        try:
            await self._client.create(EVENTS, body)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            count = (await self._client.get(EVENTS, name, namespace)).get("count") or 1
            await self._client.patch(EVENTS, name, {"count": count + 1, "lastTimestamp": moment}, namespace)
