"""Capacity as attempts see it: a view of the cluster, and the changes that it does not contain yet.

Changes of pods are collected on the event loop, and counted before the next attempt, in a thread if there are many. Two
versions say whether an older answer still counts: one changes when capacity became free, one with every change.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable

from meshwright.planner.cluster.inventory import MALFORMED
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
        self._assumed: dict[tuple[str, str], dict[str, list[str]]] = {}
        """(namespace, uid) of a job -> node -> ids of the pods that are assumed there."""
        self._counting = False
        """Whether a thread counts changes."""
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

    def requests(self) -> dict[str, PodRequest | None]:
        """What each pod requests, with changes that are not counted yet. A copy, which a thread may read."""
        return {**self.view.requests(), **self._changes}

    def pod_changed(self, pod: str, request: PodRequest | None) -> None:
        """A pod requests this now; None if it requests nothing any more."""
        self._note(pod, request)
        self.changed += 1
        if request is None:
            self.may_be_freed()
        elif request.job_uid:
            self._replace_assumed(request)

    def assume(self, pod: str, request: PodRequest) -> None:
        """Counts a pod that a job was granted until the job has a pod on its node, or until it is given up."""
        job = request.namespace, request.job_uid
        self._assumed.setdefault(job, {}).setdefault(request.node, []).append(pod)
        self._note(pod, request)
        self.changed += 1

    def give_up_assumed(self, job_uid: str) -> None:
        """Frees the nodes of the pods that were assumed for a job and do not exist."""
        for job in [job for job in self._assumed if job[1] == job_uid]:
            for pods in self._assumed.pop(job).values():
                for pod in pods:
                    self.pod_changed(pod, None)

    def _replace_assumed(self, new: PodRequest) -> None:
        """A pod of a job exists now. If it was assumed, it must not count twice."""
        pods = self._assumed.get((new.namespace, new.job_uid), {}).get(new.node)
        if pods:
            self._note(pods.pop(), None)

    def _note(self, pod: str, request: PodRequest | None) -> None:
        if request is None and not self._counting and not self.view.has_pod(pod):
            # Nobody may ask for months, as on standby: pods that came and went since the last count leave nothing.
            self._changes.pop(pod, None)
        else:
            self._changes[pod] = request

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
            self._counting = True
            try:
                await asyncio.to_thread(self.view.apply, changes)
            finally:
                self._counting = False
        elif changes:
            self.view.apply(changes)
        self.counted_freed, self.counted_changed = freed, changed
        await self._count_resources()

    async def _count_resources(self) -> None:
        """Counts the use of the GPU resources that jobs request, and of no others: each takes as much as all nodes."""
        requested = set(self._gpu_resources())
        for resource in self.view.resources():
            if resource not in requested:
                self.view.forget_unused(resource)
        for resource in requested:
            if not self.view.knows(resource):
                await asyncio.to_thread(self.view.use_of, resource)


def gpus_by_node(requests: Iterable[PodRequest | None], gpu_resource: str) -> dict[str, int]:
    """Node -> GPUs that pods request there. For metrics."""
    gpus: Counter[str] = Counter()
    for request in requests:
        if request is not None:
            with contextlib.suppress(*MALFORMED):
                gpus[request.node] += request.amount(gpu_resource).gpus
    return dict(gpus)
