"""Durations and ages in the form of kubectl."""

from __future__ import annotations

import datetime
from typing import Any

from meshwright_local.kube import timestamps


def human_duration(seconds: float) -> str:
    """Format a duration as kubectl does: `42s`, `3m10s`, `2d4h`."""
    s = int(seconds)
    for limit, unit, size, sub, part in (
        (120, "s", 1, "", 1),
        (600, "m", 60, "s", 1),
        (10800, "m", 60, "", 1),
        (28800, "h", 3600, "m", 60),
        (172800, "h", 3600, "", 1),
        (691200, "d", 86400, "h", 3600),
        (63072000, "d", 86400, "", 1),
    ):
        if s < limit:
            rest = s % size // part if sub else 0
            return f"{s // size}{unit}" + (f"{rest}{sub}" if rest else "")
    years, days = s // 31536000, s % 31536000 // 86400
    return f"{years}y" + (f"{days}d" if days and years < 8 else "")


def since(text: Any) -> str:
    """Return the time since a timestamp, as kubectl shows it."""
    try:
        age = datetime.datetime.now(datetime.UTC) - timestamps.parse(text)
        return human_duration(max(0.0, age.total_seconds()))
    except (TypeError, ValueError, AttributeError):
        return "<unknown>"
