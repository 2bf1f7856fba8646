"""Formats durations, ages and numbers, in the same way in every command."""

from __future__ import annotations

import re
from datetime import datetime

from meshwright.printable import printable

_COLOR = re.compile(r"\x1b\[[0-9;]{0,32}m")


def duration(seconds: float) -> str:
    """`150` as `2m30s`, in at most two units, as kubectl writes ages: `75` is `75s`."""
    rest = max(0, round(seconds))
    if rest < 120:
        return f"{rest}s"
    minutes, rest = divmod(rest, 60)
    if minutes < 60:
        return f"{minutes}m{rest}s" if minutes < 10 and rest else f"{minutes}m"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minutes}m" if minutes else f"{hours}h"
    days, hours = divmod(hours, 24)
    return f"{days}d{hours}h" if hours and days < 10 else f"{days}d"


def age(then: datetime | None, now: datetime) -> str:
    """The time since `then`; empty if it is unknown."""
    return "" if then is None else duration((now - then).total_seconds())


def log_line(line: str) -> str:
    """A line of a pod's log as a terminal may show it: with colors, and without other control characters.

    Of a progress bar, which overwrites itself, the last state is shown.
    """
    if line.isprintable():
        return line
    shown = line.rstrip("\r").rpartition("\r")[2]
    parts = _COLOR.split(shown)
    colors = _COLOR.findall(shown)
    text = printable(parts[0]) + "".join(color + printable(part) for color, part in zip(colors, parts[1:], strict=True))
    return f"{text}\x1b[0m" if colors else text


def plural(count: int, noun: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
