"""Writes status: computes the patch, and delays writes that only update progress.

A job writes its progress at most every `PROGRESS_SECONDS`, and all jobs share one budget (`progress_budget`). What says
more is never kept waiting for the budget: another state is written at once, and a newer checkpoint, a save that failed
or another cause of the job's time with the job's next progress.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pydantic.alias_generators import to_camel

from meshwright.api.objects import KubeObject
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright_operator.controller.unknown_fields import with_unknown_fields
from meshwright_operator.decide.progress import THROTTLED_FIELDS
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.kube.client import ApiError, KubeClient
from meshwright_operator.kube.parsed_jobs import ParsedJobs
from meshwright_operator.kube.paths import jobs_path
from meshwright_operator.kube.progress_budget import ProgressBudget
from meshwright_operator.kube.workqueue import WorkQueue

PROGRESS_SECONDS = 10.0
"""Shortest time between two writes of a job's status that only update progress."""

GOODPUT = "goodput"
PROGRESS_FIELDS = frozenset({*map(to_camel, THROTTLED_FIELDS), "readyRanks", GOODPUT})


class ConflictError(Exception):
    """The job has changed since it was read. The decision is dropped, and the job reconciled again."""


class StatusRejectedError(ApiError):
    """The API server rejects any status for the stored object, because its spec violates the schema."""


class StatusWriter:
    """Writes status, at most every `PROGRESS_SECONDS` and within the budget if only progress has changed."""

    def __init__(
        self,
        cluster: KubeClient,
        cache: Cache,
        queue: WorkQueue[JobKey],
        clock: Callable[[], float] = time.monotonic,
        budget: ProgressBudget | None = None,
    ) -> None:
        self._client = cluster
        self._cache = cache
        self._queue = queue
        self._clock = clock
        self._budget = budget if budget is not None else ProgressBudget(clock=clock)
        self._written: dict[str, float] = {}

    async def write(self, key: JobKey, job: KubeObject, status: ParallelTrainingJobStatus, has_events: bool) -> bool:
        """Write the changes, now or with the next progress. Return whether it wrote.

        Raises:
            ConflictError: The job has changed since it was read. Nothing was written.
            StatusRejectedError: The API server rejects any status for the stored object.
        """
        old = job.get("status")
        old = old if isinstance(old, dict) else {}
        new: KubeObject = dict(status.wire())
        patch = status_patch(job, new, self._cache.parsed)
        uid = job["metadata"]["uid"]
        if not patch or _only_books_time(old, patch):
            self._budget.withdraw(uid)
            return False
        if not (has_events or is_urgent(old, new)) and (delay := self._delay(uid, old, new)) > 0:
            self._queue.add_after(key, delay)
            return False
        now = self._clock()
        metadata = {"uid": uid, "resourceVersion": job["metadata"]["resourceVersion"]}
        path = f"{jobs_path(key.namespace, key.name)}/status"
        try:
            await self._patch(path, metadata, patch, merge_diff(old, new))
        except ApiError as error:
            if error.code in (404, 409):
                await self.refresh(key)
                raise ConflictError from None
            if error.code in (400, 422):
                raise StatusRejectedError(error.code, error.reason, error.message) from None
            raise
        self._written[uid] = now
        self._budget.withdraw(uid)
        return True

    def _delay(self, uid: str, old: KubeObject, new: KubeObject) -> float:
        """Seconds until the progress of a job may be written, or is asked for again; 0 if it may be written now."""
        written = self._written.get(uid, float("-inf"))
        if (left := written + PROGRESS_SECONDS - self._clock()) > 0 and not _went_back(old, new):
            return left
        return 0.0 if is_news(old, new) else self._budget.ask(uid, written)

    async def _patch(self, path: str, metadata: KubeObject, patch: KubeObject, replacement: KubeObject) -> None:
        """Write `patch`. If the API server rejects what it keeps of a later version, write `replacement`."""
        try:
            stored = await self._client.merge_patch(path, {"metadata": metadata, "status": patch})
        except ApiError as error:
            if error.code not in (400, 422) or patch == replacement:
                raise
            stored = await self._client.merge_patch(path, {"metadata": metadata, "status": replacement})
        self._cache.put_job(stored)

    async def refresh(self, key: JobKey) -> None:
        """Read the job again, because the cache is out of date."""
        try:
            self._cache.put_job(await self._client.get(jobs_path(key.namespace, key.name)))
        except ApiError as error:
            if error.code != 404:
                raise
            if (gone := self._cache.jobs.get(key)) is not None:
                self._cache.remove_job(gone)

    def forget(self, uid: str) -> None:
        """Drop the state of a deleted job."""
        self._written.pop(uid, None)
        self._budget.withdraw(uid)


def status_patch(job: KubeObject, new: KubeObject, parsed: ParsedJobs) -> KubeObject:
    """The merge patch that turns the status of `job` into `new`, except for what this version cannot read."""
    old = job.get("status")
    old = old if isinstance(old, dict) else {}
    if old == new:
        return {}
    target = with_unknown_fields(old, parsed.readable_status(job), new, ParallelTrainingJobStatus)
    patch: KubeObject = merge_diff(old, target)
    return patch


def merge_diff(old: Any, new: Any) -> Any:
    """The merge patch (RFC 7386) that turns `old` into `new`; `{}` if they are equal. A None value deletes its key."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    patch: KubeObject = {key: None for key in old if key not in new}
    for key, value in new.items():
        if key not in old:
            patch[key] = value
        elif old[key] != value:
            patch[key] = merge_diff(old[key], value)
    return patch


def is_urgent(old: KubeObject, new: KubeObject) -> bool:
    """Whether `new` changes more than progress. Then it is written at once."""
    return _without_progress(old) != _without_progress(new)


def is_news(old: KubeObject, new: KubeObject) -> bool:
    """Whether the progress in `new` has more than newer numbers: a checkpoint, a failed save, another use of time.

    A restarted operator continues from what is written: a checkpoint that is not may be unknown to it, and time is
    booked to the cause that is.
    """
    return _news(old) != _news(new)


def _went_back(old: KubeObject, new: KubeObject) -> bool:
    """Whether the job has begun to repeat steps, which the status says are done."""
    before, after = old.get("step"), new.get("step")
    return isinstance(before, int) and isinstance(after, int) and after < before


def _news(status: KubeObject) -> tuple[object, ...]:
    checkpoint, tiers, ledger = (status.get(name) for name in ("checkpoint", "checkpointTiers", GOODPUT))
    return (
        checkpoint.get("step") if isinstance(checkpoint, dict) else None,
        [(tier.get("place"), tier.get("step"), tier.get("error")) for tier in tiers if isinstance(tier, dict)]
        if isinstance(tiers, list)
        else [],
        [ledger.get(name) for name in ("cause", "gpus")] if isinstance(ledger, dict) else [],
    )


def _only_books_time(old: KubeObject, patch: KubeObject) -> bool:
    """Whether the patch only books more time for the same cause and number of GPUs, or begins the ledger of a job of an
    earlier version.

    That is written with the next other change.
    """
    changes = patch[GOODPUT] if patch.keys() == {GOODPUT} else None
    if not isinstance(changes, dict):
        return False
    return not isinstance(old.get(GOODPUT), dict) or not changes.keys() & {"cause", "gpus"}


def _without_progress(status: KubeObject) -> KubeObject:
    """The status without progress and the messages of conditions, but with whether all ranks train.

    That is written at once even if no condition shows it, because an edit is blocked.
    """
    rest = {key: value for key, value in status.items() if key not in PROGRESS_FIELDS}
    training, _, world = str(status.get("readyRanks", "")).partition("/")
    rest["allRanksTrain"] = bool(world) and training == world
    conditions = rest.get("conditions")
    if isinstance(conditions, list):
        dropped = ("message", "lastTransitionTime")
        rest["conditions"] = [
            {k: v for k, v in condition.items() if k not in dropped} if isinstance(condition, dict) else condition
            for condition in conditions
        ]
    return rest
