"""Small words for people: numbers with their nouns, and remarks added to a sentence."""

from __future__ import annotations

from collections.abc import Sequence

MAX_WARNINGS = 3


def counted(number: int, noun: str) -> str:
    """`1 pod`, `2 pods`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def with_warnings(sentence: str, warnings: Sequence[str]) -> str:
    """The sentence, then what was strange on the way to it: the first few of it."""
    more = [f"and {len(warnings) - MAX_WARNINGS} more remarks"] if len(warnings) > MAX_WARNINGS else []
    return "; ".join([sentence, *warnings[:MAX_WARNINGS], *more])
