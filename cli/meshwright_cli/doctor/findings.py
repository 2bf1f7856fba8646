"""Findings: what a check found, and how to fix it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    SKIPPED = "skipped"
    """Not checked, because the user may not see what it needs."""
    WARNING = "warning"
    """Jobs run, but worse than they could, or only some of them."""
    ERROR = "error"
    """Jobs cannot run."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding of a check."""

    check: str
    """Name of the check, such as `GPU resource`."""
    level: Level
    message: str
    fix: str = ""
    """What to do; empty if nothing is wrong."""


def ok(check: str, message: str) -> Finding:
    """Nothing is wrong."""
    return Finding(check, Level.OK, message)


def warning(check: str, message: str, fix: str) -> Finding:
    """Jobs run, but worse than they could."""
    return Finding(check, Level.WARNING, message, fix)


def error(check: str, message: str, fix: str) -> Finding:
    """Jobs cannot run."""
    return Finding(check, Level.ERROR, message, fix)


def skipped(check: str, action: str) -> Finding:
    """The user may not do what the check needs, such as `list nodes`."""
    return Finding(
        check, Level.SKIPPED, f"not checked: you may not {action}", "Run `meshwright doctor` as an administrator"
    )
