"""Time as Kubernetes writes it. Decisions get `now` as an argument; only the edges ask the clock."""

from __future__ import annotations

from datetime import UTC, datetime


def utc_now() -> datetime:
    """Now, with its time zone."""
    return datetime.now(UTC)


def parse_time(text: object) -> datetime | None:
    """An RFC 3339 time; None when it is none. A time without zone counts as UTC."""
    if not isinstance(text, str):
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def format_time(moment: datetime) -> str:
    """To the second, as `metav1.Time`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def format_micro_time(moment: datetime) -> str:
    """To the microsecond, as `metav1.MicroTime`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def seconds_since(text: str | None, now: datetime) -> float:
    """Seconds from the time in `text` to `now`; 0 when there is none or it lies ahead."""
    moment = parse_time(text)
    return 0.0 if moment is None else max(0.0, (now - moment).total_seconds())
