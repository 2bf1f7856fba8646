"""Namespace lifecycle: a namespace being deleted is emptied, resource by resource, and then finalized."""

from __future__ import annotations

import logging

from meshwright.local import clock
from meshwright.local.client import STRATEGIC_PATCH, ApiClient, ApiError
from meshwright.local.discovery import discover
from meshwright.local.informers import Informers
from meshwright.local.reflector import Change, ChangeType
from meshwright.local.resources import NAMESPACES, Object
from meshwright.local.workqueue import WorkQueue

logger = logging.getLogger(__name__)

_FINALIZER = "kubernetes"
_RETRY_SECONDS = 0.25


class NamespaceController:
    """Completes the deletion of namespaces."""

    def __init__(self, informers: Informers) -> None:
        self._client: ApiClient = informers.client
        self._queue: WorkQueue[str] = WorkQueue("namespace", self._look, workers=2)
        informers.get(NAMESPACES).listeners.append(self._changed)

    async def run(self) -> None:
        """Work until cancelled."""
        await self._queue.run()

    def _changed(self, change: Change) -> None:
        metadata = change.object["metadata"]
        if change.type is not ChangeType.DELETED and metadata.get("deletionTimestamp"):
            self._queue.add(metadata["name"])

    async def _look(self, name: str) -> float | None:
        namespace = await self._client.find(NAMESPACES, name)
        if namespace is None or not namespace["metadata"].get("deletionTimestamp"):
            return None
        if _FINALIZER not in ((namespace.get("spec") or {}).get("finalizers") or ()):
            return None
        remaining = await self._empty(name)
        if remaining:
            await self._tell(namespace, remaining)
            return _RETRY_SECONDS
        spec = namespace.get("spec") or {}
        spec["finalizers"] = [item for item in spec.get("finalizers") or () if item != _FINALIZER]
        await self._client.replace(NAMESPACES, {**namespace, "spec": spec}, "finalize")
        return None

    async def _empty(self, namespace: str) -> dict[str, int]:
        """Ask for the deletion of everything inside; returns how many of each `plural.group` are still there."""
        remaining: dict[str, int] = {}
        for item in await discover(self._client):
            resource = item.resource
            if not resource.namespaced or not item.verbs >= {"list", "delete"}:
                continue
            listed = await self._client.list(resource, namespace)
            if not listed.items:
                continue
            if "deletecollection" in item.verbs:
                await self._delete(resource.path(namespace))
            else:
                for found in listed.items:
                    await self._delete(resource.path(namespace, found["metadata"]["name"]))
            if left := len((await self._client.list(resource, namespace)).items):
                remaining[f"{resource.plural}.{resource.group}"] = left
        return remaining

    async def _delete(self, path: str) -> None:
        try:
            await self._client.request("DELETE", path, body={"propagationPolicy": "Background"})
        except ApiError as error:
            if error.status not in (404, 405, 409):
                raise

    async def _tell(self, namespace: Object, remaining: dict[str, int]) -> None:
        # The real controller's words, with the dot that its core group leaves behind ("pods. has 1 ...").
        listing = ", ".join(f"{name} has {count} resource instances" for name, count in sorted(remaining.items()))
        message = f"Some resources are remaining: {listing}"
        conditions = (namespace.get("status") or {}).get("conditions") or ()
        if any(item.get("message") == message for item in conditions):
            return
        condition = {
            "type": "NamespaceContentRemaining",
            "status": "True",
            "reason": "SomeResourcesRemain",
            "message": message,
            "lastTransitionTime": clock.now(),
        }
        await self._client.patch(
            NAMESPACES,
            namespace["metadata"]["name"],
            {"status": {"conditions": [condition]}},
            subresource="status",
            content_type=STRATEGIC_PATCH,
        )
