"""Time as Kubernetes writes it."""

from __future__ import annotations

import datetime


def now() -> str:
    """Now, RFC 3339 in whole seconds: metav1.Time."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def now_micro() -> str:
    """Now with microseconds: metav1.MicroTime."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse(text: str) -> datetime.datetime:
    """A point in time, with any number of fractional digits.

    Raises:
        ValueError: Not RFC 3339.
    """
    head, dot, tail = text.removesuffix("Z").partition(".")
    digits = tail[:6] if dot and tail.isdigit() else ""
    moment = datetime.datetime.fromisoformat(f"{head}.{digits}" if digits else head + (dot + tail if dot else ""))
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
