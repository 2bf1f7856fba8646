"""Base of every controller and the scheduler: watched resources, a queue of keys, and `reconcile`.

A change of a watched object is mapped to keys. Each key is queued at most once and processed by one task at a time.
`reconcile(key)` compares the actual state with the desired one, so it may be called at any time and any number of
times. If it raises, the key is retried after a delay that doubles with each consecutive failure.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from meshwright.api.objects import KubeObject
from meshwright_local.kube.client import ApiError
from meshwright_local.kube.recorder import EventRecorder
from meshwright_local.kube.reflector import Change, Informers, Reflector
from meshwright_local.kube.resources import Resource, key_of

logger = logging.getLogger(__name__)

Key = tuple[str, str]
"""Usually `(namespace, name)`; each controller defines what it names."""

_FIRST_RETRY, _LAST_RETRY = 0.05, 15.0


def object_key(change: Change) -> list[Key]:
    """Return the key of the changed object itself."""
    return [key_of(change.object)]


def owner_key(change: Change, kind: str) -> list[Key]:
    """Return the key of the changed object's controlling owner, if it is of this kind."""
    space, owner = change.object["metadata"].get("namespace") or "", controller_of(change.object)
    return [(space, owner["name"])] if owner and owner["kind"] == kind else []


def controller_of(item: KubeObject) -> KubeObject | None:
    """Return the owner reference with `controller: true`."""
    owners = item["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), None)


class Controller(ABC):
    """Base class: subclasses call `watch_resource` in their constructor and implement `reconcile`.

    Args:
        informers: Shared watches.
        name: In logs and as the source of events.
        workers: Number of keys processed at the same time.
    """

    def __init__(self, informers: Informers, name: str, *, workers: int = 1) -> None:
        self.client = informers.client
        self.events = EventRecorder(informers.client, name)
        self._informers = informers
        self._name = name
        self._workers = workers
        self._watched: list[Reflector] = []
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._queued: set[Key] = set()
        self._processing: set[Key] = set()
        self._dirty: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}

    def watch_resource(
        self, resource: Resource, keys: Callable[[Change], Iterable[Key]] = object_key
    ) -> dict[Key, KubeObject]:
        """Reconcile the keys of every change of a resource. Return its objects, which stay current."""
        reflector = self._informers.get(resource)
        reflector.listeners.append(lambda change: self.add(*keys(change)))
        self._watched.append(reflector)
        return reflector.objects

    @abstractmethod
    async def reconcile(self, key: Key) -> float | None:
        """Move one object toward its desired state. Return the seconds until the next reconcile, or None."""

    async def run(self) -> None:
        """Process keys until cancelled, once every watched resource is synced."""
        for reflector in self._watched:
            await reflector.synced.wait()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.events.run())
                for _ in range(self._workers):
                    group.create_task(self._work())
        finally:
            for timer in self._timers.values():
                timer.cancel()

    def add(self, *keys: Key) -> None:
        """Queue keys."""
        for key in keys:
            if timer := self._timers.pop(key, None):
                timer.cancel()
            if key in self._processing:
                self._dirty.add(key)
            elif key not in self._queued:
                self._queued.add(key)
                self._ready.put_nowait(key)

    async def _work(self) -> None:
        while True:
            key = await self._ready.get()
            self._queued.discard(key)
            self._processing.add(key)
            pause = await self._attempt(key)
            self._processing.discard(key)
            if key in self._dirty:
                self._dirty.discard(key)
                self.add(key)
            elif pause is not None:
                self._timers[key] = asyncio.get_running_loop().call_later(pause, self.add, key)

    async def _attempt(self, key: Key) -> float | None:
        try:
            pause = await self.reconcile(key)
        except Exception as error:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            # Two writers conflict regularly, and the retry resolves it.
            expected = isinstance(error, ApiError) and error.status in (404, 409)
            logger.log(logging.DEBUG if expected else logging.WARNING, "%s: %s: %r", self._name, key, error)
            return min(_LAST_RETRY, _FIRST_RETRY * 2.0 ** min(failures, 10))
        self._failures.pop(key, None)
        return pause
