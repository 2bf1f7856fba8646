"""Time as Kubernetes objects write it: UTC, whole seconds."""

from __future__ import annotations

import datetime


def now() -> datetime.datetime:
    """The present moment, with its zone."""
    return datetime.datetime.now(datetime.UTC)


def rfc3339(moment: datetime.datetime) -> str:
    """A moment as text, such as `2026-01-31T12:00:00Z`."""
    return moment.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def timestamp() -> str:
    """The present moment as text."""
    return rfc3339(now())


def parse(text: str) -> datetime.datetime:
    """A moment from text.

    Raises:
        ValueError: it is no RFC 3339 time.
    """
    moment = datetime.datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
