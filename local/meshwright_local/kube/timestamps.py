"""Timestamps in the formats of Kubernetes."""

from __future__ import annotations

import datetime


def now() -> str:
    """Return the current time as metav1.Time: RFC 3339 in whole seconds."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def now_micro() -> str:
    """Return the current time as metav1.MicroTime: with microseconds."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse(text: str) -> datetime.datetime:
    """Parse a time with any number of fractional digits.

    Raises:
        ValueError: The text is not RFC 3339.
    """
    head, dot, tail = text.removesuffix("Z").partition(".")
    digits = tail[:6] if dot and tail.isdigit() else ""
    moment = datetime.datetime.fromisoformat(f"{head}.{digits}" if digits else head + (dot + tail if dot else ""))
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
