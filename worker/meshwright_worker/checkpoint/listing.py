"""The steps of complete checkpoints, listed in a thread, so that a storage that hangs delays no step."""

from __future__ import annotations

import logging
import threading

from meshwright_worker.checkpoint.store import CheckpointStore

log = logging.getLogger(__name__)


class Listing:
    """Begins to list the complete checkpoints of a store."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._steps: frozenset[int] | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint-listing", daemon=True)
        self._thread.start()

    def steps(self, seconds: float) -> frozenset[int] | None:
        """Their steps. None if they are not known after `seconds`, or cannot be listed."""
        self._thread.join(seconds)
        return self._steps

    @property
    def busy(self) -> bool:
        """Whether the storage has not answered yet."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._steps = frozenset(self._store.steps())
        except OSError as error:
            log.warning("the checkpoints in %s cannot be listed: %s", self._store, error)
