"""Text from users' pods without control characters: a terminal would obey them, and a log line would become several."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with `?` in place of each control character, except for tabs and line feeds."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() or character in "\n\t" else "?" for character in text)
