"""Events are kept for an hour, as by a real server, so that a cluster left running does not fill up with them."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Iterator
from typing import Any

from meshwright.local.apiserver import clock
from meshwright.local.apiserver.deleting import Deleting
from meshwright.local.apiserver.resources import Resource
from meshwright.local.apiserver.writing import Writing

EVENT_LIFETIME = datetime.timedelta(hours=1)
_SWEEP_SECONDS = 60.0
_DELETES_PER_TURN = 50


def expired_events(events: Iterator[dict[str, Any]], now: datetime.datetime) -> list[dict[str, Any]]:
    """The events that nobody has touched for longer than their lifetime."""
    return [event for event in events if now - _last_touched(event, now) > EVENT_LIFETIME]


def _last_touched(event: dict[str, Any], now: datetime.datetime) -> datetime.datetime:
    series = event.get("series") or {}
    created = event["metadata"].get("creationTimestamp")
    moments = [series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"), created]
    return max((clock.parse(moment) for moment in moments if moment), default=now)


async def sweep_events(events: Resource, writing: Writing, deleting: Deleting) -> None:
    """Delete expired events once a minute, for ever."""
    while True:
        for index, event in enumerate(expired_events(writing.all_of(events.key), clock.now())):
            metadata = event["metadata"]
            if writing.find(events.key, metadata["namespace"], metadata["name"]) is not None:
                deleting.delete(events, event, {})
            if index % _DELETES_PER_TURN == _DELETES_PER_TURN - 1:
                await asyncio.sleep(0)
        await asyncio.sleep(_SWEEP_SECONDS)
