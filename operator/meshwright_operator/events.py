"""Events of jobs, for `kubectl describe`: posted in the background, repeated ones counted up instead of multiplied.

Events are for people: nothing is decided by them, and one that cannot be posted is only logged.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from meshwright.api.labels import API_VERSION, FIELD_MANAGER, KIND
from meshwright_operator.clock import format_micro_time, format_time, utc_now
from meshwright_operator.cluster import ApiError, Cluster, core_path

NORMAL = "Normal"
WARNING = "Warning"

AGGREGATION = timedelta(minutes=10)
REMEMBERED = 2048
QUEUE_SIZE = 1024
MESSAGE_LIMIT = 1024

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Note:
    """Something worth telling about a job."""

    reason: str
    """CamelCase, from a small set."""
    message: str
    kind: str = NORMAL


@dataclass(slots=True)
class _Posted:
    name: str
    count: int
    last: datetime


class EventRecorder:
    """Posts notes about jobs, one after the other."""

    def __init__(self, cluster: Cluster, instance: str) -> None:
        self._cluster = cluster
        self._instance = instance
        self._queue: asyncio.Queue[tuple[Mapping[str, Any], Note, datetime]] = asyncio.Queue(QUEUE_SIZE)
        self._posted: OrderedDict[str, _Posted] = OrderedDict()

    def post(self, job: Mapping[str, Any], note: Note) -> None:
        """Queues the note about this job object; drops it when far too many wait."""
        where = f"{job['metadata'].get('namespace')}/{job['metadata']['name']}"
        level = logging.WARNING if note.kind == WARNING else logging.INFO
        log.log(level, note.message, extra={"job": where, "reason": note.reason})
        try:
            self._queue.put_nowait((job, note, utc_now()))
        except asyncio.QueueFull:
            log.warning("an event was dropped: too many wait", extra={"job": where, "reason": note.reason})

    async def run(self) -> None:
        """Posts for ever."""
        while True:
            await self._attempt(*await self._queue.get())

    async def flush(self, seconds: float) -> None:
        """Posts what still waits, for at most `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while not self._queue.empty():
                    await self._attempt(*self._queue.get_nowait())
        except TimeoutError:
            log.warning("some events were not posted in time")

    async def _attempt(self, job: Mapping[str, Any], note: Note, moment: datetime) -> None:
        try:
            await self._post(job, note, moment)
        except ApiError as error:
            log.warning("an event could not be posted", extra={"reason": note.reason, "error": str(error)})

    async def _post(self, job: Mapping[str, Any], note: Note, moment: datetime) -> None:
        metadata = job["metadata"]
        namespace = metadata.get("namespace", "default")
        identity = "\0".join((metadata.get("uid", ""), note.reason, note.kind, note.message))
        known = self._posted.get(identity)
        if known is not None and moment - known.last < AGGREGATION:
            known.count, known.last = known.count + 1, moment
            patch = {"count": known.count, "lastTimestamp": format_time(moment)}
            try:
                await self._cluster.merge(core_path(namespace, "events", known.name), patch)
                return
            except ApiError as error:
                if error.code != 404:
                    raise
        suffix = hashlib.sha256(f"{identity}\0{moment.timestamp()}".encode()).hexdigest()[:16]
        name = f"{metadata['name']}.{suffix}"
        await self._cluster.create(core_path(namespace, "events"), self._body(metadata, namespace, name, note, moment))
        self._posted[identity] = _Posted(name, 1, moment)
        while len(self._posted) > REMEMBERED:
            self._posted.popitem(last=False)

    def _body(
        self, metadata: Mapping[str, Any], namespace: str, name: str, note: Note, moment: datetime
    ) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": metadata["name"],
                "namespace": namespace,
                "uid": metadata.get("uid", ""),
            },
            "reason": note.reason,
            "message": note.message[:MESSAGE_LIMIT],
            "type": note.kind,
            "count": 1,
            "firstTimestamp": format_time(moment),
            "lastTimestamp": format_time(moment),
            "eventTime": format_micro_time(moment),
            "action": note.reason,
            "source": {"component": FIELD_MANAGER},
            "reportingComponent": FIELD_MANAGER,
            "reportingInstance": self._instance[:128],
        }
