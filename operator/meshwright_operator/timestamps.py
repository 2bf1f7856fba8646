"""Times in the format of Kubernetes. Decisions get `now` as an argument; only code with I/O reads the clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


def utc_now() -> datetime:
    """The current time, in UTC."""
    return datetime.now(UTC)


def parse_time(text: object) -> datetime | None:
    """Parse an RFC 3339 time; None if it is not valid. A time without a zone is in UTC."""
    if not isinstance(text, str):
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def format_time(moment: datetime) -> str:
    """Format a time to the second, as `metav1.Time`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def format_micro_time(moment: datetime) -> str:
    """Format a time to the microsecond, as `metav1.MicroTime`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def unix_milliseconds(moment: datetime) -> int:
    """Complete milliseconds from the Unix epoch to a time."""
    return (moment - _EPOCH) // _MILLISECOND


def format_unix_milliseconds(milliseconds: int) -> str:
    """Format a number of milliseconds since the Unix epoch, as `metav1.MicroTime`."""
    return format_micro_time(_EPOCH + milliseconds * _MILLISECOND)


def seconds_since(text: str | None, now: datetime) -> float:
    """Seconds from the time in `text` to `now`; 0 if it is not a valid time or is in the future."""
    moment = parse_time(text)
    return 0.0 if moment is None else max(0.0, (now - moment).total_seconds())
