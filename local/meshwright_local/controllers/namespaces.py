"""Namespace lifecycle: empties a namespace that is being deleted, resource by resource, then finalizes it."""

from __future__ import annotations

from meshwright.api.objects import KubeObject
from meshwright_local.controllers.base import Controller, Key
from meshwright_local.kube import timestamps
from meshwright_local.kube.client import ApiError
from meshwright_local.kube.reflector import Informers
from meshwright_local.kube.resources import NAMESPACES

_FINALIZER = "kubernetes"
_RETRY_SECONDS = 0.25


class NamespaceController(Controller):
    """Completes the deletion of namespaces."""

    def __init__(self, informers: Informers) -> None:
        super().__init__(informers, "namespace-controller", workers=2)
        self._namespaces = self.watch_resource(NAMESPACES)

    async def reconcile(self, key: Key) -> float | None:
        """Empty one namespace that is being deleted; retry while objects are left."""
        namespace = self._namespaces.get(key)
        if namespace is None or not namespace["metadata"].get("deletionTimestamp"):
            return None
        finalizers = (namespace.get("spec") or {}).get("finalizers") or ()
        if _FINALIZER not in finalizers:
            return None
        if remaining := await self._empty(key[1]):
            await self._report_remaining(namespace, remaining)
            return _RETRY_SECONDS
        body = {**namespace, "spec": {"finalizers": [item for item in finalizers if item != _FINALIZER]}}
        # The object may have changed since, but nothing in it affects its deletion.
        body["metadata"] = {"name": key[1], "uid": namespace["metadata"]["uid"]}
        await self.client.request("PUT", NAMESPACES.path(None, key[1], "finalize"), body=body)
        return None

    async def _empty(self, namespace: str) -> dict[str, int]:
        """Delete everything in the namespace. Return how many objects of each `plural.group` are left."""
        remaining: dict[str, int] = {}
        for resource, verbs in (await self.client.resources()).items():
            if not resource.namespaced or not verbs >= {"list", "deletecollection"}:
                continue
            if not (await self.client.list(resource, namespace)).items:
                continue
            try:
                await self.client.request("DELETE", resource.path(namespace), body={"propagationPolicy": "Background"})
            except ApiError as error:
                if error.status not in (404, 405, 409):
                    raise
            if left := len((await self.client.list(resource, namespace)).items):
                remaining[f"{resource.plural}.{resource.group}"] = left
        return remaining

    async def _report_remaining(self, namespace: KubeObject, remaining: dict[str, int]) -> None:
        # The real controller's text, with the dot after a plural of the core group ("pods. has 1 ...").
        listing = ", ".join(f"{name} has {count} resource instances" for name, count in sorted(remaining.items()))
        message = f"Some resources are remaining: {listing}"
        conditions = (namespace.get("status") or {}).get("conditions") or ()
        if not any(item.get("message") == message for item in conditions):
            condition = {"type": "NamespaceContentRemaining", "status": "True", "reason": "SomeResourcesRemain"}
            condition |= {"message": message, "lastTransitionTime": timestamps.now()}
            await self.client.set_condition(NAMESPACES, namespace, condition)
