"""The Workloads of Kueue that belong to jobs: found and watched once a job names a queue, and not before.

A cluster without Kueue is asked again now and then, as long as a job names a queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from functools import partial

from meshwright.api.labels import LABEL_JOB, LABEL_JOB_UID
from meshwright.api.objects import KubeObject
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.kube.client import ApiError, KubeClient
from meshwright_operator.kube.informer import Informer, Watched
from meshwright_operator.kube.paths import group_path
from meshwright_operator.kube.versioned_store import parse_version
from meshwright_operator.kube.watch_liveness import WatchLiveness
from meshwright_operator.queues.workload_manifest import GROUP, VERSIONS

ABSENT_SECONDS = 15.0
"""Time between two looks for Kueue in a cluster that does not have it, or does not let the operator use it."""
ERROR_SECONDS = 3.0
SERVED_SECONDS = 60.0
"""Time between two looks whether the cluster still serves what is watched: a watch of what is gone says nothing."""
NOT_FOUND, FORBIDDEN = 404, 403

log = logging.getLogger(__name__)


class KueueState(StrEnum):
    """What is known of Kueue in the cluster."""

    UNKNOWN = "Unknown"
    ABSENT = "Absent"
    DENIED = "Denied"
    """The operator may not use it."""
    OFF = "Off"
    """The administrator turned queues of Kueue off."""
    WATCHED = "Watched"


class KueueWatch:
    """The Workloads by the uid of their jobs."""

    def __init__(
        self,
        client: KubeClient,
        liveness: WatchLiveness,
        namespaces: Sequence[str],
        idle_seconds: float,
        changed: Callable[[JobKey | None], None],
    ) -> None:
        """`changed` is called with the key of the job whose Workload changed, or with None if all may have."""
        self._client = client
        self._liveness = liveness
        self._namespaces: Sequence[str | None] = tuple(namespaces) or (None,)
        self._idle_seconds = idle_seconds
        self._changed = changed
        self._wanted = asyncio.Event()
        self._doubted = asyncio.Event()
        self._workloads: dict[tuple[str, str], KubeObject] = {}
        """Namespace and uid of a job -> its Workload."""
        self._versions: dict[str | None, str] = {}
        self.state = KueueState.UNKNOWN
        self.version = VERSIONS[0]
        """The version of the API that the cluster serves."""

    def want(self) -> KueueState:
        """Somebody names a queue. Returns what is known of Kueue."""
        self._wanted.set()
        return self.state

    def look_again(self) -> None:
        """A request found no Workloads: perhaps Kueue was uninstalled, or serves another version now."""
        self._doubted.set()

    def turn_off(self) -> None:
        """Nobody looks for Kueue: `run` is not called."""
        self.state = KueueState.OFF

    @property
    def doubted(self) -> bool:
        """Whether a request found no Workloads since the last look."""
        return self._doubted.is_set()

    @property
    def named(self) -> bool:
        """Whether a job has named a queue so far."""
        return self._wanted.is_set()

    def of(self, namespace: str, uid: str) -> KubeObject | None:
        """The Workload of a job."""
        return self._workloads.get((namespace, uid))

    def put(self, workload: KubeObject) -> None:
        """Stores a Workload that a job owns, unless a newer version is stored. Anybody can set the label of a job."""
        metadata, owner = workload["metadata"], _owner(workload)
        if owner is None:
            return
        old = self._workloads.get(owner)
        same = old is not None and old["metadata"].get("uid") == metadata.get("uid")
        if same and old is not None and _version(old) >= _version(workload) > 0:
            return
        self._workloads[owner] = workload
        self._changed(_job_of(workload))

    def remove(self, workload: KubeObject) -> None:
        """Removes a Workload that was deleted."""
        owner = _owner(workload)
        old = self._workloads.get(owner) if owner is not None else None
        if owner is not None and old is not None and old["metadata"].get("uid") == workload["metadata"].get("uid"):
            del self._workloads[owner]
            self._changed(_job_of(workload))

    async def run(self) -> None:
        """Waits until a queue is named, then finds and watches Workloads, until cancelled."""
        await self._wanted.wait()
        while True:
            try:
                found = await self._served_version()
                self.version = found or self.version
                if found is not None:
                    for namespace in self._namespaces:
                        await self._list(namespace)
            except ApiError as error:
                if error.code not in (FORBIDDEN, NOT_FOUND):
                    log.warning("Kueue cannot be looked up", extra={"error": str(error)})
                    await asyncio.sleep(ERROR_SECONDS)
                    continue
                found = None if error.code == NOT_FOUND else found
                self._set(KueueState.DENIED if error.code == FORBIDDEN else KueueState.ABSENT)
            else:
                self._set(KueueState.ABSENT if found is None else KueueState.WATCHED)
            if self.state is KueueState.WATCHED:
                await self._watch()
            else:
                await asyncio.sleep(ABSENT_SECONDS)

    async def _served_version(self) -> str | None:
        """The version to use. None if the cluster has no Kueue."""
        try:
            group = await self._client.get(f"/apis/{GROUP}")
        except ApiError as error:
            if error.code == NOT_FOUND:
                return None
            raise
        served = [str(entry.get("version")) for entry in group.get("versions") or ()]
        return next((version for version in VERSIONS if version in served), None)

    def path(self, namespace: str | None, name: str | None = None) -> str:
        """Path of a Workload, or of several."""
        return group_path(GROUP, self.version, namespace, "workloads", name)

    async def _list(self, namespace: str | None) -> str:
        """Lists the Workloads of a namespace, or of all, and returns the version of the list."""
        version, found = "", set[str]()
        async for page in self._client.pages(self.path(namespace), labelSelector=LABEL_JOB_UID):
            version = page.version
            for workload in page.items:
                found.add(str(workload["metadata"]["uid"]))
                self.put(workload)
        gone = [
            one
            for one in self._workloads.values()
            if namespace in (None, one["metadata"]["namespace"]) and one["metadata"]["uid"] not in found
        ]
        for workload in gone:
            if _version(workload) <= parse_version(version):
                self.remove(workload)
        self._versions[namespace] = version
        return version

    async def _watch(self) -> None:
        """Watches until the cluster does not serve this version any more."""
        async with asyncio.TaskGroup() as group:
            watches = [group.create_task(one.run(), name="watch of workloads") for one in self._informers()]
            while await self._still_served():
                self._doubted.clear()
                await asyncio.sleep(ERROR_SECONDS)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SERVED_SECONDS):
                        await self._doubted.wait()
            for watch in watches:
                watch.cancel()

    async def _still_served(self) -> bool:
        """Whether the cluster serves Workloads in the version that is watched, as far as it answers."""
        try:
            served = await self._client.get(f"/apis/{GROUP}/{self.version}")
        except ApiError as error:
            return error.code != NOT_FOUND
        return any(one.get("name") == "workloads" for one in served.get("resources") or ())

    def _informers(self) -> Iterable[Informer]:
        for namespace in self._namespaces:
            watched = Watched(
                path=self.path(namespace),
                query={"labelSelector": LABEL_JOB_UID},
                listed_version=partial(self._listed_version, namespace),
                relist=partial(self._list, namespace),
                apply=self._apply,
            )
            yield Informer(self._client, watched, self._liveness, self._idle_seconds)

    def _listed_version(self, namespace: str | None) -> str:
        return self._versions.get(namespace, "")

    def _apply(self, event: KubeObject) -> None:
        if event["type"] == "DELETED":
            self.remove(event["object"])
        else:
            self.put(event["object"])

    def _set(self, state: KueueState) -> None:
        if self.state is not state:
            log.info("Kueue", extra={"state": state.value, "version": self.version})
            self.state = state
            self._changed(None)


def _job_of(workload: KubeObject) -> JobKey:
    metadata = workload["metadata"]
    return JobKey(str(metadata["namespace"]), str(metadata["labels"].get(LABEL_JOB, "")))


def _owner(workload: KubeObject) -> tuple[str, str] | None:
    """Namespace and uid of the job that owns a Workload. None if that is not the job of its label."""
    metadata = workload["metadata"]
    uid = (metadata.get("labels") or {}).get(LABEL_JOB_UID)
    owners = metadata.get("ownerReferences") or ()
    owned = any(one.get("controller") and one.get("uid") == uid for one in owners)
    return (str(metadata.get("namespace", "")), str(uid)) if uid and owned else None


def _version(obj: KubeObject) -> int:
    return parse_version(obj["metadata"].get("resourceVersion", ""))
