"""Posts events about jobs in the background: those of a job one after the other, those of several jobs at once.

A repeated event increments the count of the first one, and many similar events are combined into one. If the API server
takes long for events, old ones are dropped for new ones. No decision depends on events: if one cannot be posted, that
is only logged.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from meshwright.api.labels import API_VERSION, FIELD_MANAGER, KIND
from meshwright.printable import printable
from meshwright_operator.kube.client import ApiError, KubeClient
from meshwright_operator.kube.event_backlog import EventBacklog, QueuedEvent
from meshwright_operator.kube.job_event import WARNING, JobEvent
from meshwright_operator.kube.paths import core_path
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.timestamps import format_micro_time, format_time, utc_now

AGGREGATION_WINDOW = timedelta(minutes=10)
CACHE_SIZE = 2048
POSTED_AT_ONCE = 8
"""Events that are posted at the same time, of different jobs: 100 jobs that fail at once are told of in seconds."""
RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Pauses before an event is posted again: a restart of the API server takes that long."""
MESSAGE_LIMIT = 1024
MAX_DISTINCT_MESSAGES = 10
"""How many different messages of one job and reason get their own event. Further messages share one event."""
ALREADY_EXISTS = 409
COMBINED_PREFIX = "(combined from similar events): "

log = logging.getLogger(__name__)


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
    """Posts events about jobs."""

    def __init__(self, cluster: KubeClient, instance: str, metrics: OperatorMetrics) -> None:
        self._client = cluster
        self._metrics = metrics
        self._instance = instance
        self._backlog = EventBacklog()
        self._posted: OrderedDict[str, _Posted] = OrderedDict()
        self._aggregates: OrderedDict[str, _Aggregate] = OrderedDict()

    def post(self, job: Mapping[str, Any], event: JobEvent) -> None:
        """Queue an event about a job. Drops an older one if too many wait."""
        metadata, event = job["metadata"], replace(event, message=printable(event.message))
        queued = QueuedEvent(
            metadata.get("namespace", "default"), metadata["name"], str(metadata.get("uid", "")), event, utc_now()
        )
        about = {"job": f"{queued.namespace}/{queued.name}", "reason": event.reason}
        log.log(logging.WARNING if event.type == WARNING else logging.INFO, event.message, extra=about)
        if (dropped := self._backlog.put(queued)) is not None:
            self._metrics.events.labels("dropped").inc()
            about = {"job": f"{dropped.namespace}/{dropped.name}", "reason": dropped.event.reason}
            log.warning("dropped an event: too many wait", extra=about)

    async def run(self) -> None:
        """Post queued events until cancelled."""
        async with asyncio.TaskGroup() as group:
            for number in range(POSTED_AT_ONCE):
                group.create_task(self._post_all(), name=f"events-{number}")

    async def _post_all(self) -> None:
        while True:
            await self._attempt(await self._backlog.wait(), RETRY_SECONDS)

    async def flush(self, seconds: float) -> None:
        """Post the remaining events, for at most `seconds`. What fails is not retried."""
        try:
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                for _ in range(min(POSTED_AT_ONCE, len(self._backlog))):
                    group.create_task(self._post_remaining())
                group.create_task(self._backlog.empty())  # also what `run` is posting
        except TimeoutError:
            log.warning("events not posted before the exit")

    async def _post_remaining(self) -> None:
        while (queued := self._backlog.take()) is not None:
            await self._attempt(queued)

    async def _attempt(self, queued: QueuedEvent, pauses: Sequence[float] = ()) -> None:
        """Post an event, and again after each pause while the server cannot be reached or is overloaded."""
        try:
            await self._post(queued, pauses)
        except ApiError as error:
            self._metrics.events.labels("failed").inc()
            log.warning("posting an event failed", extra={"reason": queued.event.reason, "error": str(error)})
        except Exception:
            # A message that cannot be encoded, for example, must not end the events of all jobs.
            self._metrics.events.labels("failed").inc()
            log.exception("posting an event failed", extra={"reason": queued.event.reason})
        else:
            self._metrics.events.labels("posted").inc()
        finally:
            self._backlog.done(queued)

    async def _post(self, queued: QueuedEvent, pauses: Sequence[float]) -> None:
        event, moment = queued.event, queued.moment
        kind = "\0".join((queued.uid, event.reason, event.type))
        identity, message, combined = f"{kind}\0{event.message}", event.message, False
        if self._recent_event(identity, moment) is None and self._exceeds_limit(kind, moment):
            identity, message, combined = kind, f"{COMBINED_PREFIX}{event.message}", True
        again = False
        for pause in (*pauses, None):
            try:
                await self._write(queued, identity, message, combined=combined)
                return
            except ApiError as error:
                if again and error.code == ALREADY_EXISTS:
                    return  # the answer to the attempt before was lost
                if pause is None or not _may_pass(error):
                    raise
            await asyncio.sleep(pause)
            again = True

    async def _write(self, queued: QueuedEvent, identity: str, message: str, *, combined: bool) -> None:
        """Count up the event with this identity, or create it."""
        moment = queued.moment
        if (known := self._recent_event(identity, moment)) is not None:
            patch = {
                "count": known.count + 1,
                "lastTimestamp": format_time(moment),
                **({"message": message[:MESSAGE_LIMIT]} if combined else {}),
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

    def _body(self, queued: QueuedEvent, name: str, message: str) -> dict[str, Any]:
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


def _may_pass(error: ApiError) -> bool:
    """Whether the same request may succeed later."""
    return error.code in (0, 429) or error.code >= 500  # noqa: PLR2004
