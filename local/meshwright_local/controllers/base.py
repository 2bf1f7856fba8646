"""What every controller and the scheduler are made of: watched resources, a queue of keys, one function to fill in.

A change of a watched object is mapped to keys. Each key waits at most once and is worked on by one worker at a time;
`reconcile(key)` looks at what is and does what is missing, so it may be called at any time and any number of times.
When it raises, the key comes back after a pause that doubles with each failure in a row.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from meshwright_local.kube.client import ApiError
from meshwright_local.kube.recorder import EventRecorder
from meshwright_local.kube.reflector import Change, Informers, Reflector
from meshwright_local.kube.resources import Object, Resource, key_of

logger = logging.getLogger(__name__)

Key = tuple[str, str]
"""Usually `(namespace, name)`; what it names is the controller's own affair."""

_FIRST_RETRY, _LAST_RETRY = 0.05, 15.0


def object_key(change: Change) -> list[Key]:
    """The changed object itself."""
    return [key_of(change.object)]


def owner_key(change: Change, kind: str) -> list[Key]:
    """The controlling owner of the changed object, if it is of this kind."""
    space, owner = change.object["metadata"].get("namespace") or "", controller_of(change.object)
    return [(space, owner["name"])] if owner and owner["kind"] == kind else []


def controller_of(item: Object) -> Object | None:
    """The owner reference marked as the managing one."""
    owners = item["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), None)


class Controller(ABC):
    """Subclasses call `watch_resource` in their constructor and fill in `reconcile`.

    Args:
        informers: Shared watches.
        name: In logs and as the source of events.
        workers: Keys worked on at the same time.
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
    ) -> dict[Key, Object]:
        """Reconcile the keys of every change of a resource; returns its objects, kept current."""
        reflector = self._informers.get(resource)
        reflector.listeners.append(lambda change: self.add(*keys(change)))
        self._watched.append(reflector)
        return reflector.objects

    @abstractmethod
    async def reconcile(self, key: Key) -> float | None:
        """Bring one thing into order; seconds after which to look again, or None."""

    async def run(self) -> None:
        """Work until cancelled, from when every followed resource is known."""
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
        """Have keys worked on soon."""
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
            # A conflict is the ordinary outcome of two writers, and the retry settles it.
            expected = isinstance(error, ApiError) and error.status in (404, 409)
            logger.log(logging.DEBUG if expected else logging.WARNING, "%s: %s: %r", self._name, key, error)
            return min(_LAST_RETRY, _FIRST_RETRY * 2.0 ** min(failures, 10))
        self._failures.pop(key, None)
        return pause
