"""Text for messages: numbers with their nouns, and warnings after a sentence."""

from __future__ import annotations

from collections.abc import Sequence

MAX_WARNINGS = 3


def counted(number: int, noun: str) -> str:
    """`1 pod`, `2 pods`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def with_warnings(sentence: str, warnings: Sequence[str]) -> str:
    """The sentence, followed by the first `MAX_WARNINGS` warnings."""
    more = [f"and {len(warnings) - MAX_WARNINGS} more remarks"] if len(warnings) > MAX_WARNINGS else []
    return "; ".join([sentence, *warnings[:MAX_WARNINGS], *more])
