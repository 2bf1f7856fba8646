"""Capacity as attempts see it: a view of the cluster, and the changes that it does not contain yet.

Changes of pods are collected on the event loop, and counted before the next attempt, in a thread if there are many. Two
versions say whether an older answer still counts: one changes when capacity became free, one with every change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from meshwright_operator.kube.pod_requests import PodRequest
from meshwright_operator.scheduling.cluster_view import ClusterView
from meshwright_operator.scheduling.pod_request_lister import PodRequestLister

INLINE_CHANGES = 256
"""More changes of pods than this are counted in a thread."""


class CountedCapacity:
    """What pods request and what is free, as of the last count."""

    def __init__(
        self, lister: PodRequestLister, gpu_resources: Callable[[], Iterable[str]], on_freed: Callable[[], None]
    ) -> None:
        """
        Args:
            lister: Lists foreign pods.
            gpu_resources: The GPU resources of all jobs.
            on_freed: Called whenever capacity may have become free.
        """
        self._lister = lister
        self._gpu_resources = gpu_resources
        self._on_freed = on_freed
        self.view = ClusterView()
        """Changed only by the placer's task, and never while an attempt runs."""
        self._changes: dict[str, PodRequest | None] = {}
        self.freed = 0
        """Changes whenever capacity may have become free. Then waiting jobs are tried again."""
        self.changed = 0
        """Changes with every change of capacity. Until then the last answer is still right."""
        self.counted_freed = self.counted_changed = 0
        """The same, of what the view of the cluster contains."""

    @property
    def uncounted(self) -> bool:
        """Whether pods changed since the last count."""
        return bool(self._changes)

    def pod_changed(self, pod: str, request: PodRequest | None) -> None:
        """A pod requests this now; None if it requests nothing any more."""
        self._changes[pod] = request
        self.changed += 1
        if request is None:
            self.may_be_freed()

    def replaced(self, pod: str) -> None:
        """An assumed pod exists now, so it no longer counts itself."""
        self._changes[pod] = None
        self.changed += 1

    def may_be_freed(self) -> None:
        """Capacity may have become free."""
        self.changed += 1
        self.freed += 1
        self._on_freed()

    async def list_foreign_pods(self) -> None:
        """Lists foreign pods again, unless the last listing is recent.

        Raises:
            ApiError: They could not be listed.
        """
        requests = await self._lister.list_if_due()
        if requests is not None and await asyncio.to_thread(self.view.replace_foreign, requests):
            self.may_be_freed()

    async def count_changes(self) -> None:
        """Counts what has changed since the last time."""
        changes, self._changes = self._changes, {}
        # What changes while this waits is counted the next time.
        freed, changed = self.freed, self.changed
        if len(changes) > INLINE_CHANGES:
            await asyncio.to_thread(self.view.apply, changes)
        elif changes:
            self.view.apply(changes)
        self.counted_freed, self.counted_changed = freed, changed
        for resource in set(self._gpu_resources()):
            if not self.view.knows(resource):
                await asyncio.to_thread(self.view.use_of, resource)
