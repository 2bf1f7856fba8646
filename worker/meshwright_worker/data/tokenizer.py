"""Bytes as tokens, for what needs no other: the demo and single prompts."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.data.tokenizers import BYTE_SEPARATOR, BYTE_VOCABULARY, ByteTokenizer

SEPARATOR = BYTE_SEPARATOR
VOCABULARY = BYTE_VOCABULARY


def encode(text: str) -> list[int]:
    """The tokens of a text: its UTF-8 bytes."""
    return ByteTokenizer().encode([text])[0]


def decode(tokens: Iterable[int]) -> str:
    """The text of tokens; a separator becomes a line break."""
    return ByteTokenizer().decode(tokens)
