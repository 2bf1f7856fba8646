"""Posts events about jobs in the background, one after the other.

A repeated event increments the count of the first one, and many similar events are combined into one. No decision
depends on events: if one cannot be posted, that is only logged.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from meshwright.api.labels import API_VERSION, FIELD_MANAGER, KIND
from meshwright.printable import printable
from meshwright_operator.decide.events import WARNING, JobEvent
from meshwright_operator.kube.client import ApiError, KubeClient
from meshwright_operator.kube.paths import core_path
from meshwright_operator.metrics.operator_metrics import OperatorMetrics
from meshwright_operator.timestamps import format_micro_time, format_time, utc_now

AGGREGATION_WINDOW = timedelta(minutes=10)
CACHE_SIZE = 2048
QUEUE_SIZE = 1024
MESSAGE_LIMIT = 1024
MAX_DISTINCT_MESSAGES = 10
"""How many different messages of one job and reason get their own event. Further messages share one event."""
COMBINED_PREFIX = "(combined from similar events): "

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _QueuedEvent:
    """An event in the queue, with the fields of the job that the Event object needs."""

    namespace: str
    name: str
    uid: str
    event: JobEvent
    moment: datetime


@dataclass(slots=True)
class _Posted:
    name: str
    count: int
    last: datetime


@dataclass(slots=True)
class _Aggregate:
    """The number of different messages of one job and reason within the aggregation window."""

    since: datetime
    count: int = 0


class EventRecorder:
    """Posts events about jobs, one after the other."""

    def __init__(self, cluster: KubeClient, instance: str, metrics: OperatorMetrics) -> None:
        self._client = cluster
        self._metrics = metrics
        self._instance = instance
        self._queue: asyncio.Queue[_QueuedEvent] = asyncio.Queue(QUEUE_SIZE)
        self._posted: OrderedDict[str, _Posted] = OrderedDict()
        self._aggregates: OrderedDict[str, _Aggregate] = OrderedDict()

    def post(self, job: Mapping[str, Any], event: JobEvent) -> None:
        """Queue an event about a job. Drops it if the queue is full."""
        metadata, event = job["metadata"], replace(event, message=printable(event.message))
        queued = _QueuedEvent(
            metadata.get("namespace", "default"), metadata["name"], str(metadata.get("uid", "")), event, utc_now()
        )
        about = {"job": f"{queued.namespace}/{queued.name}", "reason": event.reason}
        log.log(logging.WARNING if event.type == WARNING else logging.INFO, event.message, extra=about)
        try:
            self._queue.put_nowait(queued)
        except asyncio.QueueFull:
            self._metrics.events.labels("dropped").inc()
            log.warning("dropped an event: the queue is full", extra=about)

    async def run(self) -> None:
        """Post queued events until cancelled."""
        while True:
            await self._attempt(await self._queue.get())

    async def flush(self, seconds: float) -> None:
        """Post the remaining events, for at most `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while not self._queue.empty():
                    await self._attempt(self._queue.get_nowait())
        except TimeoutError:
            log.warning("events not posted before the exit")

    async def _attempt(self, queued: _QueuedEvent) -> None:
        try:
            await self._post(queued)
        except ApiError as error:
            self._metrics.events.labels("failed").inc()
            log.warning("posting an event failed", extra={"reason": queued.event.reason, "error": str(error)})
        except Exception:
            # A message that cannot be encoded, for example, must not end the events of all jobs.
            self._metrics.events.labels("failed").inc()
            log.exception("posting an event failed", extra={"reason": queued.event.reason})
        else:
            self._metrics.events.labels("posted").inc()

    async def _post(self, queued: _QueuedEvent) -> None:
        event, moment = queued.event, queued.moment
        kind = "\0".join((queued.uid, event.reason, event.type))
        identity = f"{kind}\0{event.message}"
        known = self._recent_event(identity, moment)
        message = event.message
        if known is None and self._exceeds_limit(kind, moment):
            identity, message = kind, f"{COMBINED_PREFIX}{event.message}"
            known = self._recent_event(identity, moment)
        if known is not None:
            patch = {
                "count": known.count + 1,
                "lastTimestamp": format_time(moment),
                **({"message": message[:MESSAGE_LIMIT]} if identity == kind else {}),
            }
            try:
                await self._client.merge_patch(core_path(queued.namespace, "events", known.name), patch)
                known.count, known.last = known.count + 1, moment
                return
            except ApiError as error:
                if error.code != 404:
                    raise
        suffix = hashlib.sha256(f"{identity}\0{moment.timestamp()}".encode()).hexdigest()[:16]
        name = f"{queued.name}.{suffix}"
        await self._client.create(core_path(queued.namespace, "events"), self._body(queued, name, message))
        self._posted[identity] = _Posted(name, 1, moment)
        while len(self._posted) > CACHE_SIZE:
            self._posted.popitem(last=False)

    def _recent_event(self, identity: str, moment: datetime) -> _Posted | None:
        """The posted event with this identity, if it is recent enough to increment its count."""
        known = self._posted.get(identity)
        return known if known is not None and moment - known.last < AGGREGATION_WINDOW else None

    def _exceeds_limit(self, kind: str, moment: datetime) -> bool:
        """Count one more message of a kind. Return whether its messages now share an event."""
        aggregate = self._aggregates.get(kind)
        if aggregate is None or moment - aggregate.since >= AGGREGATION_WINDOW:
            aggregate = self._aggregates[kind] = _Aggregate(moment)
        aggregate.count += 1
        while len(self._aggregates) > CACHE_SIZE:
            self._aggregates.popitem(last=False)
        return aggregate.count > MAX_DISTINCT_MESSAGES

    def _body(self, queued: _QueuedEvent, name: str, message: str) -> dict[str, Any]:
        event, moment = queued.event, queued.moment
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": queued.namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": queued.name,
                "namespace": queued.namespace,
                "uid": queued.uid,
            },
            "reason": event.reason,
            "message": message[:MESSAGE_LIMIT],
            "type": event.type,
            "count": 1,
            "firstTimestamp": format_time(moment),
            "lastTimestamp": format_time(moment),
            "eventTime": format_micro_time(moment),
            "action": event.reason,
            "source": {"component": FIELD_MANAGER},
            "reportingComponent": FIELD_MANAGER,
            "reportingInstance": self._instance[:128],
        }
