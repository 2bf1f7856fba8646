"""Lists everything periodically, to repair what watches missed.

kopf does not report jobs that were deleted while its watch was disconnected, so they would stay in the cache. The
watches of nodes and pods start at the resourceVersion of a listing, and request another one if it is too far behind.
The cache compares versions (`versioned_store`): a listing replaces and removes nothing that is newer than itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager

from meshwright.api.labels import LABEL_JOB
from meshwright_operator.kube.cache import Cache, JobKey, key_of, pod_key_of
from meshwright_operator.kube.client import ApiError, KubeClient, Page
from meshwright_operator.kube.paths import core_path, jobs_path, pods_path
from meshwright_operator.kube.pod_info import read_pod
from meshwright_operator.kube.workqueue import WorkQueue
from meshwright_operator.operator_metrics import OperatorMetrics

FIRST_RETRY_SECONDS = 2.0
FIRST_RESYNC_SECONDS = 3.0
FAILED_SHARE = 0.25
"""After a listing that failed, the next one begins after this share of the period."""
STUCK_SECONDS = 480.0
"""Longer than one page can take: four attempts of 30 s, and three pauses of 66 s that the server asks for."""

log = logging.getLogger(__name__)


class Resync:
    """Lists everything and updates the cache."""

    def __init__(
        self,
        cluster: KubeClient,
        cache: Cache,
        queue: WorkQueue[JobKey],
        metrics: OperatorMetrics,
        namespaces: Sequence[str],
        period: float,
    ) -> None:
        self._client = cluster
        self._cache = cache
        self._queue = queue
        self._metrics = metrics
        self._namespaces = namespaces
        self._period = period
        self._last: float | None = None
        self._last_began = -1.0
        self._last_progress = time.monotonic()
        self._versions: dict[str, str] = {}
        """Path of a collection -> the resourceVersion of its last listing."""

    def is_fresh(self) -> bool:
        """Whether a full listing succeeded within the last three periods."""
        return self._last is not None and time.monotonic() - self._last < 3 * self._period

    def makes_progress(self) -> bool:
        """Whether a page arrived, or a request failed, not too long ago. Only a defect in this process prevents both.

        An API server that is slow or unavailable is not a reason to restart: the listing would begin again.
        """
        return time.monotonic() - self._last_progress < self._period + STUCK_SECONDS

    def record_progress(self) -> None:
        """Another request that comes before the first listing has failed."""
        self._last_progress = time.monotonic()

    async def ensure_listed_since(self, moment: float) -> None:
        """List everything, and retry until it succeeds, unless a listing that began after `moment` has succeeded.

        No decision may be made before that.
        """
        while self._last is None or self._last_began < moment:
            try:
                await self.relist()
            except ApiError as error:
                hint = "the CRD is not installed" if error.code == 404 else str(error)
                log.warning("initial listing failed", extra={"error": hint})
                await asyncio.sleep(FIRST_RETRY_SECONDS)
        self._requeue_all()

    async def run(self) -> None:
        """List everything once per period, until cancelled.

        Before, list jobs once: some may have been deleted after the initial listing and before kopf's watch started.
        The watches of nodes and pods start at the version of their listing and miss nothing.
        """
        await asyncio.sleep(min(FIRST_RESYNC_SECONDS, self._period))
        resync = self.jobs
        while True:
            pause = self._period
            try:
                await resync()
            except ApiError as error:
                # Sooner than the next one: a continue token expired, or the server restarts.
                pause *= FAILED_SHARE
                log.warning("resync failed", extra={"error": str(error)})
            resync = self.relist
            await asyncio.sleep(pause)

    async def relist(self) -> None:
        """List everything, and queue all jobs.

        Raises:
            ApiError: A listing failed. Then only a part of the cache is up to date.
        """
        began = time.monotonic()
        try:
            await self._nodes()
            for namespace in self._namespaces or (None,):
                await self._pods(namespace)
            await self.jobs()
        finally:
            self._last_progress = time.monotonic()
        self._requeue_all()
        self._last, self._last_began = time.monotonic(), began
        self._metrics.last_resync.set_to_current_time()

    async def _pages(self, path: str, **query: str) -> AsyncIterator[Page]:
        version = ""
        async for page in self._client.pages(path, **query):
            self._last_progress = time.monotonic()
            version = page.version
            yield page
        self._versions[path] = version

    def listed_version(self, path: str) -> str:
        """The resourceVersion of the last listing of a collection, where a watch starts; empty without one."""
        return self._versions.get(path, "")

    async def nodes(self) -> str:
        """List nodes, and queue all jobs if one has changed. Return the resourceVersion of the listing.

        Raises:
            ApiError: The listing failed.
        """
        if await self._nodes():
            self._requeue_all()
        return self._versions[core_path(None, "nodes")]

    async def jobs(self) -> None:
        """List jobs, and queue those that have changed or are gone.

        Raises:
            ApiError: A listing failed. Then only a part of the cache is up to date.
        """
        for namespace in self._namespaces or (None,):
            await self._jobs(namespace)

    async def pods(self, namespace: str | None) -> str:
        """List the pods of a namespace, or of all, and queue all jobs. Return the resourceVersion of the listing.

        Raises:
            ApiError: The listing failed.
        """
        await self._pods(namespace)
        self._requeue_all()
        return self._versions[pods_path(namespace)]

    async def _nodes(self) -> bool:
        """List nodes. Return whether one differs from the cache in a way that matters for placement."""
        changed = False
        listing = self._cache.begin_nodes_listing()
        async for page in self._pages(core_path(None, "nodes")):
            listing.start_page(page.version)
            for obj in page.items:
                with _ignoring_malformed("node"):
                    listing.add(obj["metadata"]["name"], str(obj["metadata"].get("uid", "")))
                    changed = self._cache.put_node(obj) or changed
        return bool(self._cache.finish_nodes_listing(listing)) or changed

    def _requeue_all(self) -> None:
        for key in list(self._cache.jobs):
            self._queue.add_unless_backing_off(key)

    async def _pods(self, namespace: str | None) -> None:
        listing = self._cache.begin_pods_listing(namespace)
        async for page in self._pages(pods_path(namespace), labelSelector=LABEL_JOB):
            listing.start_page(page.version)
            for obj in page.items:
                with _ignoring_malformed("pod"):
                    listing.add(pod_key_of(obj), str(obj["metadata"].get("uid", "")))
                    if (pod := read_pod(obj)) is not None:
                        self._cache.put_pod(pod)
                    elif (key := self._cache.put_unowned_pod(obj)) is not None:
                        self._queue.add(key)
        self._cache.finish_pods_listing(listing)

    async def _jobs(self, namespace: str | None) -> None:
        """List jobs, and queue those that were removed or differ from the cache."""
        listing = self._cache.begin_jobs_listing(namespace)
        async for page in self._pages(jobs_path(namespace)):
            listing.start_page(page.version)
            for obj in page.items:
                with _ignoring_malformed("job"):
                    listing.add(key_of(obj), str(obj["metadata"].get("uid", "")))
                    if self._cache.put_job(obj):
                        self._queue.add(key_of(obj))
        for key in self._cache.finish_jobs_listing(listing):
            self._queue.add(key)


@contextmanager
def _ignoring_malformed(kind: str) -> Iterator[None]:
    """Leaves out an object that cannot be read, so that it does not stop the listing of all others."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError):
        log.warning("ignoring a malformed object", extra={"kind": kind}, exc_info=True)
