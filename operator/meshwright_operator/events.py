"""Events of jobs, for `kubectl describe`: posted in the background, one after the other.

Repeated ones are counted up instead of multiplied, and a flood of similar ones is folded into one. Events are for
people: nothing is decided by them, and one that cannot be posted is only logged.
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
from meshwright_operator.metrics import OperatorMetrics

NORMAL = "Normal"
WARNING = "Warning"

AGGREGATION = timedelta(minutes=10)
REMEMBERED = 2048
QUEUE_SIZE = 1024
MESSAGE_LIMIT = 1024
DIFFERENT_MESSAGES = 10
"""So many different messages of one job with one reason get an event each; further ones share one."""
COMBINED = "(combined from similar events): "

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Note:
    """Something worth telling about a job."""

    reason: str
    """CamelCase, from a small set."""
    message: str
    kind: str = NORMAL


@dataclass(frozen=True, slots=True)
class _Told:
    """A note as it waits to be posted: with the little of the job that an event needs."""

    namespace: str
    name: str
    uid: str
    note: Note
    moment: datetime


@dataclass(slots=True)
class _Posted:
    name: str
    count: int
    last: datetime


@dataclass(slots=True)
class _Similar:
    """Different messages of one job with one reason, lately."""

    since: datetime
    count: int = 0


class EventRecorder:
    """Posts notes about jobs, one after the other."""

    def __init__(self, cluster: Cluster, instance: str, metrics: OperatorMetrics) -> None:
        self._cluster = cluster
        self._metrics = metrics
        self._instance = instance
        self._queue: asyncio.Queue[_Told] = asyncio.Queue(QUEUE_SIZE)
        self._posted: OrderedDict[str, _Posted] = OrderedDict()
        self._similar: OrderedDict[str, _Similar] = OrderedDict()

    def post(self, job: Mapping[str, Any], note: Note) -> None:
        """Queues the note about this job object; drops it when far too many wait."""
        metadata = job["metadata"]
        told = _Told(
            metadata.get("namespace", "default"), metadata["name"], str(metadata.get("uid", "")), note, utc_now()
        )
        about = {"job": f"{told.namespace}/{told.name}", "reason": note.reason}
        log.log(logging.WARNING if note.kind == WARNING else logging.INFO, note.message, extra=about)
        try:
            self._queue.put_nowait(told)
        except asyncio.QueueFull:
            self._metrics.events.labels("dropped").inc()
            log.warning("an event was dropped: too many wait", extra=about)

    async def run(self) -> None:
        """Posts for ever."""
        while True:
            await self._attempt(await self._queue.get())

    async def flush(self, seconds: float) -> None:
        """Posts what still waits, for at most `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while not self._queue.empty():
                    await self._attempt(self._queue.get_nowait())
        except TimeoutError:
            log.warning("some events were not posted in time")

    async def _attempt(self, told: _Told) -> None:
        try:
            await self._post(told)
        except ApiError as error:
            self._metrics.events.labels("failed").inc()
            log.warning("an event could not be posted", extra={"reason": told.note.reason, "error": str(error)})
        else:
            self._metrics.events.labels("posted").inc()

    async def _post(self, told: _Told) -> None:
        note, moment = told.note, told.moment
        kind = "\0".join((told.uid, note.reason, note.kind))
        identity = f"{kind}\0{note.message}"
        known = self._lately(identity, moment)
        message = note.message
        if known is None and self._too_many(kind, moment):
            identity, message = kind, f"{COMBINED}{note.message}"
            known = self._lately(identity, moment)
        if known is not None:
            patch = {
                "count": known.count + 1,
                "lastTimestamp": format_time(moment),
                **({"message": message[:MESSAGE_LIMIT]} if identity == kind else {}),
            }
            try:
                await self._cluster.merge(core_path(told.namespace, "events", known.name), patch)
                known.count, known.last = known.count + 1, moment
                return
            except ApiError as error:
                if error.code != 404:
                    raise
        suffix = hashlib.sha256(f"{identity}\0{moment.timestamp()}".encode()).hexdigest()[:16]
        name = f"{told.name}.{suffix}"
        await self._cluster.create(core_path(told.namespace, "events"), self._body(told, name, message))
        self._posted[identity] = _Posted(name, 1, moment)
        while len(self._posted) > REMEMBERED:
            self._posted.popitem(last=False)

    def _lately(self, identity: str, moment: datetime) -> _Posted | None:
        """The event of this identity, if it is young enough to be counted up."""
        known = self._posted.get(identity)
        return known if known is not None and moment - known.last < AGGREGATION else None

    def _too_many(self, kind: str, moment: datetime) -> bool:
        """Counts one more message of a kind; whether there were so many different ones that they share an event."""
        similar = self._similar.get(kind)
        if similar is None or moment - similar.since >= AGGREGATION:
            similar = self._similar[kind] = _Similar(moment)
        similar.count += 1
        while len(self._similar) > REMEMBERED:
            self._similar.popitem(last=False)
        return similar.count > DIFFERENT_MESSAGES

    def _body(self, told: _Told, name: str, message: str) -> dict[str, Any]:
        note, moment = told.note, told.moment
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": told.namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": told.name,
                "namespace": told.namespace,
                "uid": told.uid,
            },
            "reason": note.reason,
            "message": message[:MESSAGE_LIMIT],
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
