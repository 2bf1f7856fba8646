"""The life of CustomResourceDefinitions on the server: serving what they define, and emptying it before they go."""

from __future__ import annotations

from typing import Any

import orjson

from meshwright.local.apiserver.deleting import Deleting
from meshwright.local.apiserver.errors import forbidden
from meshwright.local.apiserver.kinds.crds import CLEANUP_FINALIZER, CRD_KEY
from meshwright.local.apiserver.registry import Registry, crd_key
from meshwright.local.apiserver.resources import Resource
from meshwright.local.apiserver.schema.pruning import apply_defaults, prune
from meshwright.local.apiserver.store import ResourceKey, Store
from meshwright.local.apiserver.writing import Writing


class Definitions:
    """Keeps a registry in step with the definitions in a store. Call `attach` before the first write."""

    def __init__(self, store: Store, registry: Registry) -> None:
        self._store = store
        self._registry = registry
        self._writing: Writing | None = None
        self._deleting: Deleting | None = None
        for _, stored in store.items(CRD_KEY):
            self._serve(stored.obj)

    def attach(self, writing: Writing, deleting: Deleting) -> None:
        """Name those that write for this object."""
        self._writing, self._deleting = writing, deleting

    def after_write(self, resource: Resource, obj: dict[str, Any], gone: bool) -> None:
        """Follow a write of any object."""
        if resource.key == CRD_KEY:
            if gone:
                self._registry.undefine(obj)
                return
            self._serve(obj)
            if obj["metadata"].get("deletionTimestamp"):
                self._empty(obj)
        elif gone and resource.custom:
            crd = self._definition_of(resource.key)
            if crd is not None and crd["metadata"].get("deletionTimestamp"):
                self._finish(crd)

    def refuse_when_terminating(self, resource: Resource, obj: dict[str, Any]) -> None:
        """Stop a create of what is being abolished.

        Raises:
            ApiError: 403.
        """
        crd = self._definition_of(resource.key) if resource.custom else None
        if crd is not None and crd["metadata"].get("deletionTimestamp"):
            text = "create not allowed while custom resource definition is terminating"
            metadata = obj.get("metadata")
            name = metadata.get("name", "") if isinstance(metadata, dict) else ""
            raise forbidden(resource.group, resource.plural, str(name), text)

    def _definition_of(self, key: ResourceKey) -> dict[str, Any] | None:
        stored = self._store.get(CRD_KEY, "", f"{key[1]}.{key[0]}")
        return stored.obj if stored else None

    def _serve(self, crd: dict[str, Any]) -> None:
        """Serve a definition, and see its stored objects through its present schema, as reading them from disk does."""
        self._registry.define(crd)
        group, plural = crd_key(crd)
        fallback = self._registry.any_version((group, plural))

        def fit(obj: dict[str, Any]) -> None:
            version = obj["apiVersion"].rpartition("/")[2]
            resource = self._registry.get(group, version, plural) or fallback
            if resource is not None:
                prune(resource.node, obj)
                apply_defaults(resource.node, obj)

        self._store.reread((group, plural), fit)

    def _empty(self, crd: dict[str, Any]) -> None:
        key = crd_key(crd)
        resource = self._registry.any_version(key)
        if resource is not None and self._deleting is not None:
            for _, stored in list(self._store.items(key)):
                self._deleting.delete(resource, stored.obj, {})
        self._finish(crd)

    def _finish(self, crd: dict[str, Any]) -> None:
        """Let the definition go once nothing of it is left."""
        definitions = self._registry.get(CRD_KEY[0], "v1", CRD_KEY[1])
        stored = self._store.get(CRD_KEY, "", crd["metadata"]["name"])
        if stored is None or definitions is None or self._writing is None or self._store.count(crd_key(crd)):
            return
        finalizers = [f for f in stored.obj["metadata"].get("finalizers") or () if f != CLEANUP_FINALIZER]
        if finalizers == (stored.obj["metadata"].get("finalizers") or []):
            return
        new = orjson.loads(stored.body)
        new["metadata"]["finalizers"] = finalizers
        self._writing.commit(definitions, new)
