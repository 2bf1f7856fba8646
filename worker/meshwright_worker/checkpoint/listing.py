"""Whether checkpoints are still there: listed in a thread, so that a storage that hangs delays no step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from meshwright_worker.checkpoint.store import CheckpointStore

log = logging.getLogger(__name__)


class Listing:
    """Begins to list the complete checkpoints of a store, to find which of some steps are missing."""

    def __init__(self, store: CheckpointStore, steps: Iterable[int]) -> None:
        self._store = store
        self._wanted = frozenset(steps)
        self._missing: frozenset[int] | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint-listing", daemon=True)
        self._thread.start()

    def missing(self, seconds: float) -> frozenset[int] | None:
        """The steps without a complete checkpoint. None if they are not known after `seconds`, or cannot be listed."""
        self._thread.join(seconds)
        return self._missing

    @property
    def busy(self) -> bool:
        """Whether the storage has not answered yet."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._missing = self._wanted.difference(self._store.steps())
        except OSError as error:
            log.warning("the checkpoints in %s cannot be listed: %s", self._store, error)
