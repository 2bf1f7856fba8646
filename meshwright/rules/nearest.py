"""What to write instead of a number that does not work."""

from __future__ import annotations

from collections.abc import Callable


def nearest(value: int, is_valid: Callable[[int], bool], limit: int) -> str:
    """The closest values at or below and above `value` that work, among 1 to `limit`, as text for a message."""
    below = next((n for n in range(min(value, limit), 0, -1) if is_valid(n)), None)
    above = next((n for n in range(value + 1, limit + 1) if is_valid(n)), None)
    return ", ".join(str(n) for n in (below, above) if n is not None) or "none"
