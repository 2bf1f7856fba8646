"""Writing a job's status: one patch of what changed, at once or with the next progress."""

from __future__ import annotations

import time
from typing import Any

from meshwright.api.status import ParallelTrainingJobStatus
from meshwright_operator.controller.status_patch import PROGRESS_SECONDS, is_urgent, merge_diff
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.kube.client import ApiError, KubeClient, jobs_path
from meshwright_operator.kube.workqueue import WorkQueue

Object = dict[str, Any]


class ConflictError(Exception):
    """The job changed since it was read: the decision is dropped and made again."""


class StatusRejectedError(ApiError):
    """The API server takes no status for the object as it is stored: its spec breaks the schema."""


class StatusWriter:
    """Writes status, and remembers of every job when that was: progress alone waits for its turn."""

    def __init__(self, cluster: KubeClient, cache: Cache, queue: WorkQueue[JobKey]) -> None:
        self._client = cluster
        self._cache = cache
        self._queue = queue
        self._written: dict[str, float] = {}

    async def write(self, key: JobKey, job: Object, status: ParallelTrainingJobStatus, has_events: bool) -> bool:
        """Writes what changed, at once or with the next progress; whether it wrote.

        Raises:
            StaleError: the job is another one by now; nothing was written.
            StatusRejectedError: the API server takes no status for the object as it is stored.
        """
        old = job.get("status")
        old = old if isinstance(old, dict) else {}
        new: Object = dict(status.wire())
        patch = merge_diff(old, new)
        if not patch:
            return False
        uid, now = job["metadata"]["uid"], time.monotonic()
        since = now - self._written.get(uid, float("-inf"))
        if not (has_events or is_urgent(old, new)) and since < PROGRESS_SECONDS:
            self._queue.add_after(key, PROGRESS_SECONDS - since)
            return False
        metadata = {"uid": uid, "resourceVersion": job["metadata"]["resourceVersion"]}
        path = f"{jobs_path(key.namespace, key.name)}/status"
        try:
            self._cache.put_job(await self._client.merge_patch(path, {"metadata": metadata, "status": patch}))
        except ApiError as error:
            if error.code in (404, 409):
                await self._refresh(key)
                raise ConflictError from None
            if error.code in (400, 422):
                raise StatusRejectedError(error.code, error.reason, error.message) from None
            raise
        self._written[uid] = now
        return True

    async def _refresh(self, key: JobKey) -> None:
        """Reads the job again, since the cache is behind."""
        try:
            self._cache.put_job(await self._client.get(jobs_path(key.namespace, key.name)))
        except ApiError as error:
            if error.code != 404:
                raise
            if (gone := self._cache.jobs.get(key)) is not None:
                self._cache.remove_job(gone)

    def forget(self, uid: str) -> None:
        """Drop what is remembered of a job that is gone."""
        self._written.pop(uid, None)
