"""Delays between reconciles of a job whose writes the API server refuses because it has changed."""

from __future__ import annotations

from meshwright_operator.kube.cache import JobKey

FIRST_SECONDS = 0.1
LONGEST_SECONDS = 30.0


class StaleRetries:
    """Counts, for each job, the reconciles in a row that were based on an old state.

    The first is repeated at once, because the state was read again. If that is refused too, somebody changes the
    objects all the time, or the API server answers with old states: then the delay grows.
    """

    def __init__(self) -> None:
        self._stale: dict[JobKey, int] = {}

    def delay(self, key: JobKey) -> float:
        """Count one more stale reconcile. Return after how many seconds to reconcile the job again."""
        before = self._stale.get(key, 0)
        self._stale[key] = before + 1
        return min(FIRST_SECONDS * 2.0 ** min(before - 1, 16), LONGEST_SECONDS) if before else 0.0

    def reset(self, key: JobKey) -> None:
        """A reconcile succeeded, or the job was deleted."""
        self._stale.pop(key, None)
