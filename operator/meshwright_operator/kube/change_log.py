"""Which names have changed since a version: readers of a large collection update only these."""

from __future__ import annotations

from collections import deque
from itertools import islice

MAX_CHANGES = 16_384
"""Changes that are remembered. A reader that is further behind reads everything."""


class ChangeLog:
    """A version counter, and the names that changed with each increment."""

    def __init__(self) -> None:
        self.version = 0
        """Increases with every change."""
        self._names: deque[str] = deque(maxlen=MAX_CHANGES)

    def record(self, name: str) -> None:
        """Record a change of this name."""
        self.version += 1
        self._names.append(name)

    def since(self, version: int) -> set[str] | None:
        """The names that changed after `version`; None if that is too long ago to know."""
        changes = self.version - version
        if changes > len(self._names) or changes < 0:
            return None
        return set(islice(reversed(self._names), changes))
