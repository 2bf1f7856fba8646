"""Creating, replacing, patching and applying objects.

Everything here runs without awaiting between reading and writing, so each request is one atomic step on the store.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import orjson

from meshwright.local.apiserver.admission import (
    admit,
    check_finalizers,
    check_identity,
    check_type,
    drop_unknown_fields,
)
from meshwright.local.apiserver.apply.managers import Writer, track_update
from meshwright.local.apiserver.apply.merge import ApplyConflict, server_side_apply
from meshwright.local.apiserver.clock import timestamp
from meshwright.local.apiserver.errors import (
    ApiError,
    Cause,
    already_exists,
    bad_request,
    forbidden,
    invalid,
    invalid_options,
    invalid_value,
    not_found,
    required,
)
from meshwright.local.apiserver.options import WriteOptions
from meshwright.local.apiserver.resources import Resource
from meshwright.local.apiserver.store import ResourceKey, Store

JsonObject = dict[str, Any]
Hook = Callable[[Resource, JsonObject, bool], None]
"""Called after a write with the resource, the object, and whether it is gone."""

NAMESPACES = ("", "namespaces")
_SUFFIX_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
_SUFFIX_LENGTH = 5
_NAME_ATTEMPTS = 8
_FIXED_METADATA = (
    "uid",
    "name",
    "namespace",
    "generateName",
    "creationTimestamp",
    "generation",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
)


class Writing:
    """Writes on one store.

    Args:
        store: where objects live.
        after_write: told of every write, before its request is answered.
    """

    def __init__(self, store: Store, after_write: Hook) -> None:
        self._store = store
        self._after_write = after_write

    def find(self, key: ResourceKey, namespace: str, name: str) -> JsonObject | None:
        """One object, not to be changed; None when it does not exist."""
        stored = self._store.get(key, namespace, name)
        return stored.obj if stored else None

    def all_of(self, key: ResourceKey, namespace: str = "") -> Iterator[JsonObject]:
        """All objects of a resource, not to be changed."""
        return (stored.obj for _, stored in self._store.items(key, namespace))

    def copy_of(self, key: ResourceKey, namespace: str, name: str) -> JsonObject | None:
        """One object to change freely; None when it does not exist."""
        stored = self._store.get(key, namespace, name)
        return orjson.loads(stored.body) if stored else None

    def create(self, resource: Resource, namespace: str, obj: JsonObject, options: WriteOptions) -> JsonObject:
        """Create an object.

        Raises:
            ApiError: it exists, is invalid, or has no namespace to live in.
        """
        return self._create(resource, namespace, obj, options, applied=False)

    def _create(
        self, resource: Resource, namespace: str, obj: JsonObject, options: WriteOptions, *, applied: bool
    ) -> JsonObject:
        check_type(resource, obj)
        metadata = obj["metadata"]
        self._settle(resource, namespace, metadata)
        self._name(resource, metadata)
        if resource.has_status:
            obj.pop("status", None)
        for key in ("deletionTimestamp", "deletionGracePeriodSeconds", "selfLink", "generation"):
            metadata.pop(key, None)
        if metadata.pop("resourceVersion", "") not in ("", "0"):
            raise bad_request("resourceVersion should not be set on objects to be created")
        admit(resource, obj, None, options)
        resource.rules.on_create(obj, self)
        metadata.update(uid=str(uuid.uuid4()), creationTimestamp=timestamp())
        if resource.counts_generation:
            metadata["generation"] = 1
        if not applied:
            track_update(resource.node, None, obj, self._writer(resource, options, ""), resource.custom)
        if options.dry_run:
            return obj
        created = self._store.put(resource.key, obj).obj
        self._after_write(resource, created, False)
        return created

    def _settle(self, resource: Resource, namespace: str, metadata: JsonObject) -> None:
        if not resource.namespaced:
            metadata.pop("namespace", None)
            return
        if metadata.get("namespace") not in (None, "", namespace):
            raise bad_request("the namespace of the provided object does not match the namespace sent on the request")
        home = self.find(NAMESPACES, "", namespace)
        if home is None:
            raise not_found("", "namespaces", namespace)
        if home["metadata"].get("deletionTimestamp"):
            text = f"unable to create new content in namespace {namespace} because it is being terminated"
            cause = Cause("metadata.namespace", "NamespaceTerminating", f"namespace {namespace} is being terminated")
            raise forbidden(resource.group, resource.plural, metadata.get("name", ""), text, [cause])
        metadata["namespace"] = namespace

    def _name(self, resource: Resource, metadata: JsonObject) -> None:
        name, prefix = metadata.get("name"), metadata.get("generateName")
        namespace = metadata.get("namespace", "")
        if not name and isinstance(prefix, str) and prefix:
            for _ in range(_NAME_ATTEMPTS):
                suffix = "".join(random.choices(_SUFFIX_LETTERS, k=_SUFFIX_LENGTH))  # noqa: S311 - a name, no secret
                name = metadata["name"] = prefix[: 63 - _SUFFIX_LENGTH] + suffix
                if self._store.get(resource.key, namespace, name) is None:
                    break
        if not isinstance(name, str) or not name:
            cause = required("metadata.name", "name or generateName is required")
            raise invalid(resource.group, resource.kind, "", [cause])
        if self._store.get(resource.key, namespace, name) is not None:
            raise already_exists(resource.group, resource.plural, name)

    def update(
        self, resource: Resource, old: JsonObject, new: JsonObject, options: WriteOptions, subresource: str = ""
    ) -> JsonObject:
        """Replace `old` by `new` under the rules of an update through `subresource` ("" for the object itself).

        Raises:
            ApiError: it is invalid, or was based on another state.
        """
        return self._update(resource, old, new, options, subresource, applied=False)

    def replace(
        self, resource: Resource, old: JsonObject, new: JsonObject, options: WriteOptions, subresource: str = ""
    ) -> JsonObject:
        """A PUT: an update that, for custom resources, must name the revision it is based on.

        Raises:
            ApiError: as `update`.
        """
        check_type(resource, new)
        if resource.custom and not new["metadata"].get("resourceVersion"):
            cause = invalid_value("metadata.resourceVersion", 0, "must be specified for an update")
            raise invalid(resource.group, resource.kind, old["metadata"]["name"], [cause])
        return self.update(resource, old, new, options, subresource)

    def _update(
        self,
        resource: Resource,
        old: JsonObject,
        new: JsonObject,
        options: WriteOptions,
        subresource: str,
        *,
        applied: bool,
    ) -> JsonObject:
        check_type(resource, new)
        check_identity(resource, new, old)
        new = self._restrict(resource, old, new, subresource)
        metadata, was = new["metadata"], old["metadata"]
        check_finalizers(resource, new, old)
        admit(resource, new, old, options, subresource)
        if not applied:
            track_update(resource.node, old, new, self._writer(resource, options, subresource), resource.custom)
        if "generation" in was and subresource != "status" and _essence(resource, new) != _essence(resource, old):
            metadata["generation"] = was["generation"] + 1
        metadata["resourceVersion"] = was["resourceVersion"]
        if _without_times(new) == _without_times(old):
            return old
        return new if options.dry_run else self.commit(resource, new)

    def commit(self, resource: Resource, obj: JsonObject) -> JsonObject:
        """Store an object, or remove it when its deletion waited for just this write."""
        metadata = obj["metadata"]
        gone = bool(metadata.get("deletionTimestamp")) and not metadata.get("finalizers")
        gone = gone and not resource.rules.lingers(obj)
        stored = (self._store.remove if gone else self._store.put)(resource.key, obj).obj
        self._after_write(resource, stored, gone)
        return stored

    def _restrict(self, resource: Resource, old: JsonObject, new: JsonObject, subresource: str) -> JsonObject:
        """The new object with everything put back that this way of writing may not change."""
        metadata, was = new["metadata"], old["metadata"]
        for key in _FIXED_METADATA:
            if key in was:
                metadata[key] = was[key]
            else:
                metadata.pop(key, None)
        if subresource == "status":
            kept = orjson.loads(orjson.dumps(old))
            kept["metadata"]["managedFields"] = metadata.get("managedFields")
            kept.pop("status", None)
            new = {**kept, "status": new["status"]} if "status" in new else kept
        elif resource.has_status:
            new.pop("status", None)
            if "status" in old:
                new["status"] = orjson.loads(orjson.dumps(old["status"]))
        new["apiVersion"], new["kind"] = resource.group_version, resource.kind
        return new

    def apply(
        self,
        resource: Resource,
        place: tuple[str, str],
        config: JsonObject,
        options: WriteOptions,
        subresource: str = "",
    ) -> tuple[JsonObject, bool]:
        """Server-side apply of `config` to the object at `place` (namespace, name); says whether that created it.

        Raises:
            ApiError: as `create` and `update`, and 409 with one cause per field that another manager owns.
        """
        config = self._applicable(resource, place, config, options, subresource)
        live = self.copy_of(resource.key, *place)
        if live is None and (subresource or config["metadata"].get("uid")):
            raise resource.not_found(place[1])
        writer = self._writer(resource, options, subresource)
        try:
            merged = server_side_apply(resource.node, live, config, writer, force=options.force)
        except ApplyConflict as error:
            raise _conflict(error) from None
        if live is None:
            return self._create(resource, place[0], merged, options, applied=True), True
        return self._update(resource, live, merged, options, subresource, applied=True), False

    def _applicable(
        self, resource: Resource, place: tuple[str, str], config: JsonObject, options: WriteOptions, subresource: str
    ) -> JsonObject:
        if not options.explicit_manager:
            raise invalid_options("PatchOptions", required("fieldManager", "is required for apply patch"))
        for key in ("apiVersion", "kind"):
            if not config.get(key):
                raise bad_request(f"{key} must be set in an apply patch")
        check_type(resource, config)
        metadata = config["metadata"]
        if metadata.get("managedFields"):
            raise bad_request("metadata.managedFields must be nil")
        for key, value in (("namespace", place[0]), ("name", place[1])):
            if value and metadata.setdefault(key, value) != value:
                raise bad_request(f"metadata.{key} ({metadata[key]}) does not match the one on the URL ({value})")
        if subresource == "status":
            identity = {k: v for k, v in metadata.items() if k in ("name", "namespace", "uid", "resourceVersion")}
            config = {k: v for k, v in config.items() if k in ("apiVersion", "kind", "status")}
            config["metadata"] = identity
        elif resource.has_status:
            config.pop("status", None)
        drop_unknown_fields(resource, config, options)
        return config

    def _writer(self, resource: Resource, options: WriteOptions, subresource: str) -> Writer:
        return Writer(options.manager, subresource, resource.group_version, timestamp())


def _essence(resource: Resource, obj: JsonObject) -> JsonObject:
    """What `metadata.generation` counts changes of."""
    left_out = ("metadata", "status") if resource.has_status else ("metadata",)
    return {key: value for key, value in obj.items() if key not in left_out}


def _without_times(obj: JsonObject) -> JsonObject:
    """The object without the times in `managedFields`, which alone make no new revision."""
    entries = [{k: v for k, v in e.items() if k != "time"} for e in obj["metadata"].get("managedFields") or ()]
    return {**obj, "metadata": {**obj["metadata"], "managedFields": entries}}


def _conflict(error: ApplyConflict) -> ApiError:
    causes = []
    for manager, path in error.conflicts:
        text = f'conflict with "{manager.name}"' + (
            f' with subresource "{manager.subresource}"' * bool(manager.subresource)
        )
        if manager.operation == "Update":
            text += f" using {manager.api_version}"
        name = "".join(f".{p[2:]}" if p.startswith("f:") else f"[{p[2:]}]" for p in path)
        causes.append(Cause(name, "FieldManagerConflict", text))
    word = "conflict" if len(causes) == 1 else "conflicts"
    text = ", ".join(f"{c.message}: {c.field}" for c in causes)
    details = {"causes": [c.wire() for c in causes]}
    return ApiError(409, "Conflict", f"Apply failed with {len(causes)} {word}: {text}", details)
