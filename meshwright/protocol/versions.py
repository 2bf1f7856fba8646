"""Versions of the protocol: each side supports a range, and both use the highest version that both support.

Agents and the operator are upgraded at different times. An agent names its range with each request, and the coordinator
uses the highest version of it that it supports. Version 1 is that of release 0.1.0. Every later release supports it.

Within a version, fields may be added: both sides ignore fields that they do not know, and read a value that they do not
know as the nearest safe one. Anything else is a new version.
"""

from __future__ import annotations

import re

OLDEST, NEWEST = 1, 1
"""The versions that this release supports."""
VERSION_HEADER = "Meshwright-Protocol"
"""The versions that the sender of a request supports, such as `1` or `1-3`; without it, version 1."""

_RANGE = re.compile(r"([1-9]\d{0,5})(?:-([1-9]\d{0,5}))?", re.ASCII)


class VersionError(ValueError):
    """The two sides support no common version. The message names both ranges."""


def supported() -> str:
    """The value of the header in requests."""
    return _text(OLDEST, NEWEST)


def negotiate(header: str | None) -> int:
    """The version to use with a sender whose request has this header.

    Raises:
        VersionError: there is none, or the header is invalid.
    """
    match = _RANGE.fullmatch(header.strip()) if header is not None else None
    if header is not None and match is None:
        raise VersionError(f"{VERSION_HEADER} must be a version or a range, such as 1 or 1-3, got {header[:16]!r}")
    oldest = int(match[1]) if match else 1
    newest = int(match[2] or match[1]) if match else 1
    if newest < OLDEST or oldest > NEWEST or oldest > newest:
        older = newest < OLDEST
        fix = "use a worker image of the operator's release" if older else "upgrade the operator to the image's release"
        raise VersionError(
            f"this agent supports protocol version {_text(oldest, newest)}, the coordinator {supported()}: {fix}"
        )
    return min(newest, NEWEST)


def _text(oldest: int, newest: int) -> str:
    return str(oldest) if oldest == newest else f"{oldest}-{newest}"
