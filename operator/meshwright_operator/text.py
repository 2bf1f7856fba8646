"""Parts of messages: numbers with their nouns, and joined sentences."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.figures import counted as counted

MAX_WARNINGS = 3


def capitalized(text: str) -> str:
    """The text with a capital first letter; unchanged if it begins with the path of a field."""
    return text if text.startswith("spec") else text[:1].upper() + text[1:]


def shortened(text: str, limit: int) -> str:
    """The text with at most `limit` characters."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def sentences(*parts: str) -> str:
    """The parts that are not empty as sentences, without a period at the end."""
    return ". ".join(part.rstrip(". ") for part in parts if part)


def with_warnings(sentence: str, warnings: Sequence[str]) -> str:
    """The sentence, followed by the first `MAX_WARNINGS` warnings."""
    if not warnings:
        return sentence
    more = [f"{len(warnings) - MAX_WARNINGS} more"] if len(warnings) > MAX_WARNINGS else []
    title = "Warning" if len(warnings) == 1 else "Warnings"
    return sentences(sentence, f"{title}: {'; '.join([*warnings[:MAX_WARNINGS], *more])}")
