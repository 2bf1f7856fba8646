"""The store: every object in memory, every write in SQLite before it is acknowledged, one revision counter.

SQLite runs in WAL mode with `synchronous=NORMAL`: an acknowledged write survives the death of the process (kill -9),
because the page cache holds the log; a power cut may lose the last moments but never leaves a torn file. All calls
are short and synchronous, so inside one event loop every write is atomic.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

from meshwright.local.apiserver.eventlog import Change, Event, EventLog, Stored

ResourceKey = tuple[str, str]
"""Group and plural: versions of a resource share their objects."""

EVENTS_PER_RESOURCE = 1500

_TABLES = """
create table if not exists objects (
    grp text, plural text, ns text, name text, body blob, primary key (grp, plural, ns, name)
) without rowid;
create table if not exists revision (id integer primary key check (id = 0), value integer);
"""


class StoreInUseError(RuntimeError):
    """Another server holds this directory."""


class Store:
    """Objects by resource, namespace and name.

    Args:
        directory: where the database lives; None keeps everything in memory.

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
        self._objects: dict[ResourceKey, dict[tuple[str, str], Stored]] = {}
        self._logs: dict[ResourceKey, EventLog] = {}
        row = self._db.execute("select value from revision").fetchone()
        self.revision: int = row[0] if row else 1
        for group, plural, namespace, name, body in self._db.execute("select grp, plural, ns, name, body from objects"):
            self._objects.setdefault((group, plural), {})[namespace, name] = Stored(orjson.loads(body), body)
        self._floor = self.revision

    def close(self) -> None:
        """Give the database and its lock back."""
        self._db.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def get(self, key: ResourceKey, namespace: str, name: str) -> Stored | None:
        """The object, or None."""
        return self._objects.get(key, {}).get((namespace, name))

    def items(self, key: ResourceKey, namespace: str = "") -> Iterator[tuple[tuple[str, str], Stored]]:
        """All objects of a resource in order of namespace and name; of one namespace when it is given."""
        found = self._objects.get(key, {})
        for place in sorted(p for p in found if not namespace or p[0] == namespace):
            yield place, found[place]

    def count(self, key: ResourceKey) -> int:
        """How many objects a resource has."""
        return len(self._objects.get(key, {}))

    def log(self, key: ResourceKey) -> EventLog:
        """The recent changes of a resource."""
        log = self._logs.get(key)
        if log is None:
            log = self._logs[key] = EventLog(self._floor, self._events_per_resource)
        return log

    def put(self, key: ResourceKey, obj: dict[str, Any]) -> Stored:
        """Create or replace an object; sets its `metadata.resourceVersion`. The store owns `obj` from now on."""
        place = _place(obj)
        old = self._objects.get(key, {}).get(place)
        stored = self._stamp(obj)
        self._write("insert or replace into objects values (?,?,?,?,?)", (*key, *place, stored.body))
        self._objects.setdefault(key, {})[place] = stored
        self._announce(key, "MODIFIED" if old else "ADDED", stored, old)
        return stored

    def remove(self, key: ResourceKey, obj: dict[str, Any]) -> Stored:
        """Delete an object; `obj` is its last state and gets the revision of the deletion."""
        place = _place(obj)
        old = self._objects.get(key, {}).get(place)
        stored = self._stamp(obj)
        self._write("delete from objects where grp=? and plural=? and ns=? and name=?", (*key, *place))
        self._objects.get(key, {}).pop(place, None)
        self._announce(key, "DELETED", stored, old)
        return stored

    def reread(self, key: ResourceKey, change: Callable[[dict[str, Any]], None]) -> None:
        """Pass every object of a resource through `change` as if just read from disk: nothing is written or announced.

        A changed schema is seen by objects that were stored before it, without a new revision of any of them.
        """
        for place, stored in self._objects.get(key, {}).items():
            obj = orjson.loads(stored.body)
            change(obj)
            self._objects[key][place] = Stored(obj, orjson.dumps(obj))

    def _stamp(self, obj: dict[str, Any]) -> Stored:
        obj["metadata"]["resourceVersion"] = str(self.revision + 1)
        return Stored(obj, orjson.dumps(obj))

    def _write(self, statement: str, values: tuple[object, ...]) -> None:
        self._db.execute("begin")
        try:
            self._db.execute(statement, values)
            self._db.execute("insert or replace into revision values (0, ?)", (self.revision + 1,))
            self._db.execute("commit")
        except sqlite3.Error:
            self._db.execute("rollback")
            raise
        self.revision += 1

    def _announce(self, key: ResourceKey, change: Change, stored: Stored, old: Stored | None) -> None:
        self.log(key).append(Event(self.revision, change, stored, old))


def _place(obj: dict[str, Any]) -> tuple[str, str]:
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


def _private_file(path: Path) -> str:
    """Make sure that only the owner reads the objects, secrets among them; SQLite's log takes over the mode."""
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
