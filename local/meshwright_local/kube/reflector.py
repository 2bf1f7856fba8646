"""List and watch: a local copy of a resource that reports every difference, also across lost connections.

A watch misses deletions while it is disconnected. After each interruption the reflector therefore lists the resource
again and compares it with the copy: it reports missing objects as deleted, and a name whose uid changed as deleted and
added.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from meshwright.api.objects import KubeObject
from meshwright_local.kube.client import REQUEST_ERRORS, ApiClient, ApiError
from meshwright_local.kube.resources import Resource, key_of

logger = logging.getLogger(__name__)

_MAX_BACKOFF_SECONDS = 5.0


class ChangeType(StrEnum):
    """What happened to an object."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


@dataclass(frozen=True, slots=True)
class Change:
    """One difference: the object now (if it was deleted, its last state) and before."""

    type: ChangeType
    object: KubeObject
    old: KubeObject | None = None


class Reflector:
    """Keeps `objects` equal to a resource on the server and calls `listeners` for every change, in order.

    Listeners are functions that must not block, for example by adding to a queue. `synced` is set after the first list.
    """

    def __init__(
        self,
        client: ApiClient,
        resource: Resource,
        *,
        namespace: str | None = None,
        label_selector: str | None = None,
        field_selector: str | None = None,
        trim: Callable[[KubeObject], KubeObject] | None = None,
    ) -> None:
        self.resource = resource
        self.objects: dict[tuple[str, str], KubeObject] = {}
        self.synced = asyncio.Event()
        self.listeners: list[Callable[[Change], None]] = []
        self._client = client
        self._namespace = namespace
        self._labels = label_selector
        self._fields = field_selector
        self._trim = trim

    async def run(self) -> None:
        """Watch the resource until cancelled. Retries with exponential backoff."""
        version = ""
        failures = 0
        while True:
            try:
                if not version:
                    version = await self._list()
                async for event in self._client.watch(
                    self.resource, version, self._namespace, label_selector=self._labels, field_selector=self._fields
                ):
                    version = event["object"]["metadata"]["resourceVersion"]
                    failures = 0
                    if event["type"] != "BOOKMARK":
                        self._store(ChangeType(event["type"]), event["object"])
            except REQUEST_ERRORS as error:
                version = ""
                # A revision that is too old is expected: list again at once.
                failures += not (isinstance(error, ApiError) and error.status in (410, 504))
                logger.debug("%s: watch lost: %r", self.resource.plural, error)
            backoff = min(_MAX_BACKOFF_SECONDS, 0.05 * 2 ** min(failures, 10)) if failures else 0.0
            await asyncio.sleep(backoff * (0.5 + random.random()))  # noqa: S311 - jitter, not a secret

    async def _list(self) -> str:
        listed = await self._client.list(
            self.resource, self._namespace, label_selector=self._labels, field_selector=self._fields
        )
        current = {key_of(item): item for item in listed.items}
        for key, old in list(self.objects.items()):
            if key not in current:
                self._store(ChangeType.DELETED, old)
        for item in current.values():
            self._store(ChangeType.MODIFIED, item)
        self.synced.set()
        return listed.resource_version

    def _store(self, change: ChangeType, item: KubeObject) -> None:
        if self._trim is not None:
            item = self._trim(item)
        key = key_of(item)
        old = self.objects.get(key)
        if change is ChangeType.DELETED:
            self.objects.pop(key, None)
            if old is not None:
                self._notify(Change(change, item, old))
            return
        if old is not None and old["metadata"]["uid"] != item["metadata"]["uid"]:
            self._notify(Change(ChangeType.DELETED, old, old))
            old = None
        if old is not None and old["metadata"]["resourceVersion"] == item["metadata"]["resourceVersion"]:
            return
        self.objects[key] = item
        self._notify(Change(ChangeType.ADDED if old is None else ChangeType.MODIFIED, item, old))

    def _notify(self, change: Change) -> None:
        for listener in self.listeners:
            try:
                listener(change)
            except Exception:
                logger.exception("%s: a listener failed", self.resource.plural)


class Informers:
    """One shared reflector per resource for all components of a process."""

    def __init__(self, client: ApiClient) -> None:
        self.client = client
        self._reflectors: dict[Resource, Reflector] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def get(self, resource: Resource) -> Reflector:
        """Return the reflector of a resource. It runs from `start` on: listeners that are added before miss nothing."""
        return self._reflectors.setdefault(resource, Reflector(self.client, resource))

    def start(self) -> None:
        """Start every reflector that `get` returned."""
        self._tasks = [asyncio.create_task(reflector.run()) for reflector in self._reflectors.values()]

    async def stop(self) -> None:
        """Stop every reflector."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
