"""Formats durations and times, in the same way in the live view, the line view and the summary."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path


def clock(seconds: float) -> str:
    """`75.2` as `1:15`."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"


KUBECTL = "to use kubectl in another terminal:  "


def kubectl_hint(kubeconfig: Path, columns: int, home: Path) -> str:
    """How to use kubectl, in the longest form that fits: a command that is cut would be copied without its end."""
    command = f"export KUBECONFIG={kubeconfig}"
    forms = [KUBECTL + command, command]
    if kubeconfig.is_relative_to(home):
        short = f"export KUBECONFIG=~/{kubeconfig.relative_to(home)}"
        forms[1:1] = [KUBECTL + short]
        forms.append(short)
    return next((form for form in forms if len(form) <= columns), "to use kubectl: see the command above")


def format_age(time: str, now: datetime) -> str:
    """How long ago an RFC 3339 time was, such as `4 s ago`; empty if `time` is not one."""
    try:
        then = datetime.fromisoformat(time)
    except ValueError:
        return ""
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    seconds = max(0, int((now - then).total_seconds()))
    return f"{seconds} s ago" if seconds < 120 else f"{seconds // 60} min ago"
