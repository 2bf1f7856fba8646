"""The store: every object as JSON in memory, every write in SQLite before it is acknowledged, one revision counter.

SQLite runs in WAL mode with `synchronous=NORMAL`: an acknowledged write survives a crash of the process (kill -9),
because the log is in the page cache. A power failure may lose the last writes but never corrupts the file. All calls
are short and synchronous, so inside one event loop every write is atomic.

Watchers have no queues. Each has a position in the log of its resource and is woken when the log grows, so a slow
client needs no memory; if the log no longer has its position, its watch ends with 410.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import orjson

from meshwright.api.objects import KubeObject

ResourceKey = tuple[str, str]
"""Group and plural: versions of a resource share their objects."""

Place = tuple[str, str]
"""Namespace and name."""

EVENTS_PER_RESOURCE = 1500
_TABLES = """
create table if not exists objects (
    grp text, plural text, ns text, name text, body blob, primary key (grp, plural, ns, name)
) without rowid;
create table if not exists revision (id integer primary key check (id = 0), value integer);
"""


class StoreInUseError(RuntimeError):
    """Another server uses this directory."""


class RevisionTooOldError(Exception):
    """The requested revision is older than the log."""


@lru_cache(maxsize=1024)
def _parsed(body: bytes) -> KubeObject:
    obj: KubeObject = orjson.loads(body)
    return obj


@dataclass(frozen=True, slots=True)
class Stored:
    """One state of an object as JSON, which needs a tenth of the memory of a dict."""

    body: bytes
    api_version: str

    @classmethod
    def of(cls, obj: KubeObject) -> Stored:
        """The state of an object now."""
        # They are first, so that lists can leave them out.
        head = {key: obj[key] for key in ("apiVersion", "kind") if key in obj}
        return cls(orjson.dumps({**head, **obj}), obj.get("apiVersion", ""))

    @property
    def obj(self) -> KubeObject:
        """The object. Do not change it."""
        return _parsed(self.body)


@dataclass(frozen=True, slots=True)
class Event:
    """One change: from `old` (None for a new object) to `new` (for a deleted one, the last state)."""

    revision: int
    change: str
    place: Place
    new: Stored
    old: Stored | None
    at: float
    """Its time, by the monotonic clock."""


class EventLog:
    """The recent changes of one resource, at least `size` of them. Revisions up to `floor` are not in it."""

    def __init__(self, floor: int, size: int) -> None:
        self.floor = floor
        self._size = size
        self._events: list[Event] = []
        self._base = 0  # position of _events[0] counted from the first event ever
        self._wakers: set[asyncio.Event] = set()

    @property
    def end(self) -> int:
        """The position after the newest event."""
        return self._base + len(self._events)

    def append(self, event: Event) -> None:
        """Add an event and wake all watchers."""
        self._events.append(event)
        if len(self._events) >= 2 * self._size:
            self.floor = self._events[self._size - 1].revision
            del self._events[: self._size]
            self._base += self._size
        for waker in self._wakers:
            waker.set()

    def position_after(self, revision: int) -> int:
        """Return the position of the first event after `revision`; raises Overrun if events may be missing."""
        if revision < self.floor:
            raise RevisionTooOldError(f"too old resource version: {revision} ({self.floor})")
        return self._base + bisect_right(self._events, revision, key=lambda event: event.revision)

    def read(self, position: int, limit: int = 500) -> list[Event]:
        """Return at most `limit` events from `position` on; raises Overrun if the log no longer has it."""
        if position < self._base:
            raise RevisionTooOldError(f"too old resource version: the watcher fell behind ({self.floor})")
        return self._events[position - self._base : position - self._base + limit]

    async def wait(self, position: int, seconds: float) -> bool:
        """Wait until there is an event at `position`. Return False after `seconds`."""
        if position < self.end:
            return True
        waker = asyncio.Event()
        self._wakers.add(waker)
        try:
            async with asyncio.timeout(seconds):
                return await waker.wait()
        except TimeoutError:
            return False
        finally:
            self._wakers.discard(waker)


class Store:
    """Objects by resource, namespace and name, stored in `directory`, or only in memory if that is None.

    Raises:
        StoreInUseError: another process has the directory open.
    """

    def __init__(self, directory: Path | None, events_per_resource: int = EVENTS_PER_RESOURCE) -> None:
        self._lock: int | None = None if directory is None else _lock(directory)
        path = ":memory:" if directory is None else _private_file(directory / "objects.sqlite")
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("pragma journal_mode=wal")
        self._db.execute("pragma synchronous=normal")
        self._db.executescript(_TABLES)
        self._events_per_resource = events_per_resource
        self._objects: dict[ResourceKey, dict[Place, Stored]] = {}
        self._logs: dict[ResourceKey, EventLog] = {}
        row = self._db.execute("select value from revision").fetchone()
        self.revision: int = row[0] if row else 1
        for group, plural, namespace, name, body in self._db.execute("select grp, plural, ns, name, body from objects"):
            self._objects.setdefault((group, plural), {})[namespace, name] = Stored.of(orjson.loads(body))
        self._floor = self.revision

    def close(self) -> None:
        """Close the database and release its lock."""
        self._db.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def get(self, key: ResourceKey, namespace: str, name: str) -> Stored | None:
        """Return the current state of one object; None if it does not exist."""
        return self._objects.get(key, {}).get((namespace, name))

    def find(self, key: ResourceKey, namespace: str, name: str) -> KubeObject | None:
        """Return one object, which must not be changed; None if it does not exist."""
        stored = self.get(key, namespace, name)
        return stored.obj if stored else None

    def copy(self, key: ResourceKey, namespace: str, name: str) -> KubeObject | None:
        """Return a copy of one object; None if it does not exist."""
        stored = self.get(key, namespace, name)
        return orjson.loads(stored.body) if stored else None

    def items(self, key: ResourceKey, namespace: str = "", as_of: int | None = None) -> Iterator[tuple[Place, Stored]]:
        """Return all objects of a resource, ordered by namespace and name; only those of `namespace` if it is given.

        `as_of` returns their state at an earlier revision, or at the earliest one in the log.
        """
        found = self._objects.get(key, {})
        if as_of is not None:
            log, found = self.log(key), dict(found)
            for event in reversed(log.read(log.position_after(max(as_of, log.floor)), log.end)):
                if event.old is None:
                    found.pop(event.place, None)
                else:
                    found[event.place] = event.old
        for place in sorted(p for p in found if not namespace or p[0] == namespace):
            yield place, found[place]

    def all(self, key: ResourceKey, namespace: str = "") -> Iterator[KubeObject]:
        """Return all objects of a resource, in no particular order. Do not change them."""
        found = self._objects.get(key, {}).items()
        return (stored.obj for place, stored in found if not namespace or place[0] == namespace)

    def log(self, key: ResourceKey) -> EventLog:
        """Return the log of a resource's recent changes."""
        if key not in self._logs:
            self._logs[key] = EventLog(self._floor, self._events_per_resource)
        return self._logs[key]

    def put(self, key: ResourceKey, obj: KubeObject) -> KubeObject:
        """Create or replace an object; sets its `metadata.resourceVersion`. The store owns `obj` from now on."""
        return self._write(key, obj, gone=False)

    def remove(self, key: ResourceKey, obj: KubeObject) -> KubeObject:
        """Delete an object; `obj` is its last state and gets the revision of the deletion."""
        return self._write(key, obj, gone=True)

    def transform_all(self, key: ResourceKey, change: Callable[[KubeObject], None]) -> None:
        """Apply `change` to every object of a resource in memory, without a write or an event.

        A changed schema thereby applies to objects that were stored before, without new revisions.
        """
        for place, stored in self._objects.get(key, {}).items():
            obj = orjson.loads(stored.body)
            change(obj)
            self._objects[key][place] = Stored.of(obj)

    def _write(self, key: ResourceKey, obj: KubeObject, *, gone: bool) -> KubeObject:
        place, objects = _place(obj), self._objects.setdefault(key, {})
        revision, old = self.revision + 1, objects.get(place)
        obj["metadata"]["resourceVersion"] = str(revision)
        new = Stored.of(obj)
        self._db.execute("begin")
        try:
            if gone:
                self._db.execute("delete from objects where grp=? and plural=? and ns=? and name=?", (*key, *place))
            else:
                self._db.execute("insert or replace into objects values (?,?,?,?,?)", (*key, *place, new.body))
            self._db.execute("insert or replace into revision values (0, ?)", (revision,))
            self._db.execute("commit")
        except sqlite3.Error:
            self._db.execute("rollback")
            raise
        self.revision = revision
        if gone:
            objects.pop(place, None)
        else:
            objects[place] = new
        change = "DELETED" if gone else "MODIFIED" if old else "ADDED"
        self.log(key).append(Event(revision, change, place, new, old, time.monotonic()))
        return obj


def _place(obj: KubeObject) -> Place:
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


def _private_file(path: Path) -> str:
    """Make the database readable only by its owner, because it has secrets. SQLite's log inherits the mode."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    return str(path)


def _lock(directory: Path) -> int:
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise StoreInUseError(f"{directory} is in use by another server; stop it or choose another directory") from None
    return handle
