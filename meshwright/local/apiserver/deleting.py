"""Deleting: at once, or by a mark that others act on (finalizers, grace periods, garbage collection).

As in the real server, garbage collection itself is a controller's work: a foreground or orphaning delete only leaves
the finalizer that tells the collector what to do with the dependents.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

import orjson

from meshwright.local.apiserver.clock import now, parse, rfc3339
from meshwright.local.apiserver.resources import Resource
from meshwright.local.apiserver.store import Store
from meshwright.local.apiserver.writing import Hook

FOREGROUND, ORPHAN = "foregroundDeletion", "orphan"


class Deleting:
    """Deletes on one store; `after_write` is told of every change."""

    def __init__(self, store: Store, after_write: Hook) -> None:
        self._store = store
        self._after_write = after_write

    def delete(
        self, resource: Resource, obj: dict[str, Any], options: Mapping[str, Any]
    ) -> tuple[dict[str, Any], bool]:
        """Delete an object or begin to.

        Returns:
            The object as it is now, or was last; and whether it is gone.

        Raises:
            ApiError: 409 when a precondition does not hold, 403 for what may not be deleted.
        """
        _check_preconditions(resource, obj["metadata"], options.get("preconditions") or {})
        new = orjson.loads(orjson.dumps(obj))
        metadata = new["metadata"]
        grace = resource.rules.grace_seconds(new, options.get("gracePeriodSeconds"))
        _set_collection(metadata, options.get("propagationPolicy"))
        started = bool(metadata.get("deletionTimestamp"))
        if not started:
            resource.rules.on_delete(new)
            metadata["deletionTimestamp"] = rfc3339(now() + datetime.timedelta(seconds=grace))
            metadata["deletionGracePeriodSeconds"] = grace
            if "generation" in metadata:
                metadata["generation"] += 1
        elif resource.rules.graceful and grace < metadata.get("deletionGracePeriodSeconds", 0):
            sooner = metadata["deletionGracePeriodSeconds"] - grace
            moment = parse(metadata["deletionTimestamp"]) - datetime.timedelta(seconds=sooner)
            metadata["deletionTimestamp"] = rfc3339(moment)
            metadata["deletionGracePeriodSeconds"] = grace
        gone = not metadata.get("finalizers") and not resource.rules.lingers(new)
        if options.get("dryRun") or (not gone and new == obj):
            return new, gone
        if gone:
            return self._remove(resource, new, started), True
        stored = self._store.put(resource.key, new).obj
        self._after_write(resource, stored, False)
        return stored, False

    def _remove(self, resource: Resource, obj: dict[str, Any], started: bool) -> dict[str, Any]:
        if not started and not resource.rules.graceful:
            # What goes at once was never in the state of being deleted.
            for key in ("deletionTimestamp", "deletionGracePeriodSeconds"):
                del obj["metadata"][key]
        stored = self._store.remove(resource.key, obj).obj
        self._after_write(resource, stored, True)
        return stored


def _check_preconditions(resource: Resource, metadata: dict[str, Any], wanted: Mapping[str, Any]) -> None:
    for key, word in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
        if wanted.get(key) not in (None, metadata[key]):
            text = f"Precondition failed: {word} in precondition: {wanted[key]}, {word} in object meta: {metadata[key]}"
            raise resource.conflict(metadata["name"], text)


def _set_collection(metadata: dict[str, Any], policy: str | None) -> None:
    """Leave the finalizers that tell the garbage collector what becomes of the dependents."""
    if policy is None:
        return
    wanted = {"Foreground": {FOREGROUND}, "Orphan": {ORPHAN}}.get(policy, set())
    others = [f for f in metadata.get("finalizers") or () if f not in (FOREGROUND, ORPHAN)]
    finalizers = sorted({*others, *wanted})
    if finalizers:
        metadata["finalizers"] = finalizers
    else:
        metadata.pop("finalizers", None)
