"""Asks the API server for pods that are missing from the cache, before they are replaced.

A pod is missing from the watch, and so from the cache, if it lost the label by which the watch selects pods, or if the
watch is behind. Each incarnation of a worker is asked for once: a pod that does not exist is never created again under
the same name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from typing import NamedTuple

from meshwright.api.labels import LABEL_JOB, LABEL_JOB_UID
from meshwright.api.objects import KubeObject, pod_name
from meshwright_operator.kube.cache import Cache, JobKey
from meshwright_operator.kube.client import ApiError, KubeClient
from meshwright_operator.kube.paths import pods_path
from meshwright_operator.kube.pod_info import read_pod

LIST_FROM = 8
"""Number of pods from which one list is cheaper than a request for each."""


class Incarnation(NamedTuple):
    """A worker's pod."""

    worker: int
    number: int


class MissingPods:
    """Confirms once that pods do not exist. Puts pods that do exist into the cache."""

    def __init__(self, cluster: KubeClient, cache: Cache) -> None:
        self._client = cluster
        self._cache = cache
        self._absent: dict[str, dict[int, int]] = {}
        """Job's uid -> worker -> the latest incarnation that is known not to exist."""

    def unconfirmed(self, uid: str, pods: Iterable[Incarnation]) -> list[Incarnation]:
        """Those of the pods of which it is not known that they do not exist."""
        absent = self._absent.get(uid, {})
        return [pod for pod in pods if absent.get(pod.worker, -1) < pod.number]

    def set_absent(self, uid: str, pods: Iterable[Incarnation]) -> None:
        """Record that these pods do not exist: the API server rejected them, or was asked for them."""
        absent = self._absent.setdefault(uid, {})
        for pod in pods:
            absent[pod.worker] = max(pod.number, absent.get(pod.worker, -1))

    def forget(self, uid: str) -> None:
        """Drop the state of a deleted job."""
        self._absent.pop(uid, None)

    async def confirm(self, key: JobKey, uid: str, pods: Collection[Incarnation]) -> None:
        """Ask the API server for these pods. Restores the job label of pods that have lost it.

        Raises:
            ApiError: A request failed. Some pods may be confirmed.
        """
        named = {pod_name(key.name, *pod): pod for pod in pods}
        if len(named) >= LIST_FROM:
            found = await self._list(key, uid)
        else:
            found = dict(zip(named, await asyncio.gather(*(self._get(key, name) for name in named)), strict=True))
        existing = {name: obj for name in named if (obj := found.get(name)) is not None and _owned(obj, uid)}
        await asyncio.gather(*(self._adopt(key, name, obj) for name, obj in existing.items()))
        cached = {pod.name for pod in self._cache.pods(key, uid)}
        self.set_absent(uid, (pod for name, pod in named.items() if name not in existing or name not in cached))

    async def _list(self, key: JobKey, uid: str) -> dict[str, KubeObject | None]:
        found: dict[str, KubeObject | None] = {}
        async for page in self._client.pages(pods_path(key.namespace), labelSelector=f"{LABEL_JOB_UID}={uid}"):
            found |= {obj["metadata"]["name"]: obj for obj in page.items}
        return found

    async def _get(self, key: JobKey, name: str) -> KubeObject | None:
        try:
            return await self._client.get(pods_path(key.namespace, name))
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    async def _adopt(self, key: JobKey, name: str, obj: KubeObject) -> None:
        """Put a pod of the job into the cache, with the job label, by which the watch selects pods."""
        if (obj["metadata"].get("labels") or {}).get(LABEL_JOB) != key.name:
            patch = {"metadata": {"uid": obj["metadata"]["uid"], "labels": {LABEL_JOB: key.name}}}
            try:
                obj = await self._client.merge_patch(pods_path(key.namespace, name), patch)
            except ApiError as error:
                if error.code not in (404, 409):
                    raise
                return
        if (pod := read_pod(obj)) is not None:
            self._cache.put_pod(pod)


def _owned(obj: KubeObject, uid: str) -> bool:
    owners = obj["metadata"].get("ownerReferences") or ()
    return any(owner.get("uid") == uid for owner in owners)
