"""The newest known version of each object of one resource, whatever the order in which versions arrive.

A list and a watch, or two lists, may deliver the versions of an object in any order. This module compares the
`resourceVersion` of objects, of deletions and of lists. They come from one counter per resource: Kubernetes 1.35
guarantees it (KEP-5504), and every release behaves so. Three rules follow:

- An older version never replaces a newer one, even of another object with the same name.
- A deletion leaves a tombstone, so that a version from before the deletion is not stored again.
- A complete list removes every object that is not in it and is not newer than the list. From then on, the list is the
  tombstone of all objects that it does not contain.

A version of 0 means unknown. Unknown versions are stored in the order in which they arrive, and a list removes only
objects that have not changed since it began. If a list is older than one that was complete before it began, the server
was restored from a backup: all versions become unknown, and the list counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

MAX_TOMBSTONES = 32_768
"""A complete list makes most tombstones superfluous. The limit matters only while no list succeeds."""

log = logging.getLogger(__name__)


class _Mark(NamedTuple):
    uid: str
    version: int
    change: int
    """Number of the change that stored it."""


class _Tombstone(NamedTuple):
    version: int
    namespace: str


class VersionedStore(Generic[Key, Value]):
    """The values of one resource by key.

    Args:
        namespace_of: Returns the namespace of a key.
        final: Whether a deleted uid never returns. It does if the watch selects by label: an object without the label
            is reported as deleted, and later returns.
    """

    def __init__(self, namespace_of: Callable[[Key], str], *, final: bool) -> None:
        self.values: dict[Key, Value] = {}
        self._namespace_of = namespace_of
        self._final = final
        self._marks: dict[Key, _Mark] = {}
        self._tombstones: dict[str, _Tombstone] = {}
        self._listed_at: dict[str | None, int] = {}
        """Namespace, or None for all -> version of the newest complete list."""
        self._changes = 0

    def put(self, key: Key, uid: str, version: int, value: Value) -> bool:
        """Store the value, unless it is older than what is known. Return whether it was stored."""
        if not self.accepts(key, uid, version):
            return False
        self._changes += 1
        self.values[key] = value
        self._marks[key] = _Mark(uid, version, self._changes)
        return True

    def accepts(self, key: Key, uid: str, version: int) -> bool:
        """Whether this version of the object is at least as new as what is known."""
        tombstone = self._tombstones.get(uid)
        if tombstone is not None and (self._final or 0 < version <= tombstone.version):
            return False
        mark = self._marks.get(key)
        if mark is None:
            return not version or version > self._listed_version(self._namespace_of(key))
        return not version or version >= mark.version

    def remove(self, key: Key, uid: str, version: int) -> bool:
        """Remove the object that was deleted at this version. Return whether its key is removed.

        Without a uid, the key is removed in any case.
        """
        if uid:
            self._bury(key, uid, version)
            mark = self._marks.get(key)
            if mark is not None and not self._is_before(mark, uid, version):
                return False
        return self.forget(key)

    def forget(self, key: Key) -> bool:
        """Remove a key without a tombstone. Return whether it was stored."""
        self._marks.pop(key, None)
        present = key in self.values
        self.values.pop(key, None)
        return present

    def uid_of(self, key: Key) -> str:
        """The uid of the stored object; empty without one."""
        mark = self._marks.get(key)
        return mark.uid if mark is not None else ""

    def begin_listing(self, namespace: str | None = None) -> Listing[Key, Value]:
        """Begin to list the objects of a namespace, or of all if it is None."""
        return Listing(self, namespace, self._listed_at.get(namespace, 0), self._changes)

    def _is_before(self, mark: _Mark, uid: str, version: int) -> bool:
        """Whether the stored version is from before the deletion."""
        if mark.uid == uid and (self._final or not (version and mark.version)):
            return True
        return 0 < mark.version <= version

    def _bury(self, key: Key, uid: str, version: int) -> None:
        old = self._tombstones.pop(uid, None)
        self._tombstones[uid] = _Tombstone(max(version, old.version if old else 0), self._namespace_of(key))
        while len(self._tombstones) > MAX_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]

    def _listed_version(self, namespace: str) -> int:
        return max(self._listed_at.get(None, 0), self._listed_at.get(namespace, 0))

    # For Listing.

    def _remove_missing(
        self, listed: Mapping[Key, str], namespace: str | None, version: int, since: int
    ) -> list[tuple[Key, Value]]:
        """Remove and return the values that a complete list does not contain and that are not newer than it."""
        removed = []
        for key in self.values.keys() - listed.keys():
            if namespace is not None and self._namespace_of(key) != namespace:
                continue
            mark = self._marks.get(key, _Mark("", 0, 0))
            if mark.version <= version if version and mark.version else mark.change <= since:
                removed.append((key, self.values[key]))
                self.remove(key, mark.uid, mark.version)
        return removed

    def _complete(self, listed: Mapping[Key, str], namespace: str | None, version: int) -> None:
        """From now on, the list is the tombstone of the objects that it does not contain."""
        if version <= self._listed_at.get(namespace, 0):
            return
        self._listed_at[namespace] = version
        uids = set(listed.values())
        self._tombstones = {
            uid: tombstone
            for uid, tombstone in self._tombstones.items()
            if uid in uids or tombstone.version > version or namespace not in (None, tombstone.namespace)
        }

    def _forget_versions(self, namespace: str | None) -> None:
        log.warning("resource versions went backwards: the API server was restored from a backup")
        for key, mark in self._marks.items():
            if namespace in (None, self._namespace_of(key)):
                self._marks[key] = mark._replace(version=0)
        self._tombstones = {u: t for u, t in self._tombstones.items() if namespace not in (None, t.namespace)}
        self._listed_at.pop(namespace, None)


class Listing(Generic[Key, Value]):
    """One list of a resource, page by page."""

    def __init__(self, store: VersionedStore[Key, Value], namespace: str | None, listed_at: int, since: int) -> None:
        self._store = store
        self._namespace = namespace
        self._listed_at = listed_at
        self._since = since
        self._version = 0
        self._listed: dict[Key, str] = {}

    def start_page(self, resource_version: str) -> None:
        """Begin a page. All pages of a list have the same version. Call this before the page's objects are stored."""
        if self._listed or self._version:
            return
        self._version = parse_version(resource_version)
        if 0 < self._version < self._listed_at:
            self._store._forget_versions(self._namespace)

    def add(self, key: Key, uid: str) -> None:
        """Record that the list contains this object."""
        self._listed[key] = uid

    def finish(self) -> list[tuple[Key, Value]]:
        """Remove what is not in the list, now that all its pages have arrived. Return the removed keys and values."""
        removed = self._store._remove_missing(self._listed, self._namespace, self._version, self._since)
        if self._version:
            self._store._complete(self._listed, self._namespace, self._version)
        return removed


def parse_version(value: Any) -> int:
    """A `resourceVersion` as a number; 0 if it is not one."""
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 40 else 0
