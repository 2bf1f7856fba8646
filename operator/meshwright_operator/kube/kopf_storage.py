"""kopf without a memory of its own: nothing is kept on objects, and nothing is copied to compare them.

kopf copies every object of every event, deeply and several times, to see what changed since a handler ran last. The
handlers here only take note of events, so that half of the operator's time would be spent on an answer nobody asks for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import kopf
from kopf import DiffBaseStorage, ProgressStorage


class NoDiff(DiffBaseStorage):
    """No object has an essence: none ever changed."""

    def build(self, *, body: Any, extra_fields: Iterable[Any] | None = None) -> Any:
        """Nothing of the object."""
        return {}

    def fetch(self, *, body: Any) -> None:
        """There is no earlier essence."""

    def store(self, *, body: Any, patch: Any, essence: Any) -> None:
        """Keeps nothing."""


class NoProgress(ProgressStorage):
    """No handler has a state."""

    def fetch(self, *, key: Any, body: Any) -> None:
        """There is no state."""

    def store(self, *, key: Any, record: Any, body: Any, patch: Any) -> None:
        """Keeps nothing."""

    def purge(self, *, key: Any, body: Any, patch: Any) -> None:
        """There is nothing to forget."""

    def touch(self, *, body: Any, patch: Any, value: str | None) -> None:
        """Writes nothing: a touch would make an event of its own."""

    def clear(self, *, essence: Any) -> Any:
        """The essence as it is."""
        return essence


def disable_persistence(settings: kopf.OperatorSettings) -> None:
    """Tells kopf so."""
    settings.persistence.diffbase_storage = NoDiff()
    settings.persistence.progress_storage = NoProgress()
