"""Bytes as tokens: nothing to train, nothing to download, every text can be written and read back."""

from __future__ import annotations

from collections.abc import Iterable

SEPARATOR = 256
"""The token after each document."""

VOCABULARY = 257
"""The 256 byte values and the separator."""


def encode(text: str) -> list[int]:
    """The tokens of a text: its UTF-8 bytes."""
    return list(text.encode())


def decode(tokens: Iterable[int]) -> str:
    """The text of tokens; a separator becomes a line break.

    Ids above the separator exist only where a vocabulary was rounded up; they never occur in data and are left out.
    """
    raw = bytes(token if token < SEPARATOR else ord("\n") for token in tokens if token <= SEPARATOR)
    return raw.decode(errors="replace")
