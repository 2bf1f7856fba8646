"""Creates, replaces, patches, applies and deletes objects. All writes to the store go through this module.

Nothing here awaits between reading and writing, so each request is atomic. As in the real server, a controller does
garbage collection: a foreground or orphaning delete only sets the finalizer that tells the collector what to do with
the dependents.
"""

from __future__ import annotations

import datetime
import random
import uuid

import orjson

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver import status_errors
from meshwright_local.apiserver.admission import quota
from meshwright_local.apiserver.admission.admit import admit, check_identity, check_type
from meshwright_local.apiserver.admission.pods import EPHEMERAL
from meshwright_local.apiserver.query_options import WriteOptions, invalid_options
from meshwright_local.apiserver.registry.crds import CLEANUP_FINALIZER, CRDS, crd_key
from meshwright_local.apiserver.registry.discovery import Registry
from meshwright_local.apiserver.registry.server_side_apply import Writer, server_side_apply, track_update
from meshwright_local.apiserver.resource_types import Resource
from meshwright_local.apiserver.schema.structural import apply_defaults, prune
from meshwright_local.apiserver.status_errors import Cause
from meshwright_local.apiserver.store import ResourceKey, Store
from meshwright_local.kube import timestamps

NAMESPACES = ("", "namespaces")
MAX_OBJECT_BYTES = 1536 * 1024
"""The largest object that etcd stores with its default settings."""
_COLLECTOR_FINALIZERS = {"Foreground": "foregroundDeletion", "Orphan": "orphan"}
_SUFFIX_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
_NOT_FROM_CLIENTS = ("deletionTimestamp", "deletionGracePeriodSeconds", "selfLink", "generation")
_FIXED = ("uid", "name", "namespace", "generateName", "creationTimestamp", *_NOT_FROM_CLIENTS)


class Objects:
    """Writes to one store. They update `registry` when definitions change."""

    def __init__(self, store: Store, registry: Registry) -> None:
        self.store = store
        self.registry = registry
        for crd in store.all(CRDS):
            self._serve(crd)

    def create(
        self, resource: Resource, namespace: str, obj: KubeObject, options: WriteOptions, *, applied: bool = False
    ) -> KubeObject:
        """Create an object; raises ApiError if it exists or is invalid, or its namespace does not exist."""
        check_type(resource, obj)
        metadata = obj["metadata"]
        self._check_namespace(resource, namespace, metadata)
        self._name(resource, metadata)
        if resource.has_status:
            obj.pop("status", None)
        for key in _NOT_FROM_CLIENTS:
            metadata.pop(key, None)
        if metadata.pop("resourceVersion", "") not in ("", "0"):
            raise status_errors.bad_request("resourceVersion should not be set on objects to be created")
        admit(resource, obj, None, options, "")
        if options.check is not None:
            options.check(resource, obj, None)
        if not applied:
            track_update(resource.node, None, obj, _writer(resource, options, ""), custom=resource.custom)
        resource.rules.create(obj, self.store)
        metadata.update(uid=str(uuid.uuid4()), creationTimestamp=timestamps.now())
        if resource.counts_generation:
            metadata["generation"] = 1
        quota.check_quotas(self.store, resource, obj)
        return obj if options.dry_run else self._write(resource, obj, gone=False)

    def _check_namespace(self, resource: Resource, namespace: str, metadata: KubeObject) -> None:
        group, plural, name = resource.group, resource.plural, str(metadata.get("name") or "")
        crd = self.store.find(CRDS, "", f"{plural}.{group}") if resource.custom else None
        if crd is not None and crd["metadata"].get("deletionTimestamp"):
            text = "create not allowed while custom resource definition is terminating"
            raise status_errors.forbidden(group, plural, name, text)
        if not resource.namespaced:
            metadata.pop("namespace", None)
            return
        if metadata.get("namespace") not in (None, "", namespace):
            raise status_errors.bad_request(
                "the namespace of the provided object does not match the namespace sent on the request"
            )
        home = self.store.find(NAMESPACES, "", namespace)
        if home is None:
            raise self.registry.builtin(NAMESPACES).not_found(namespace)
        if home["metadata"].get("deletionTimestamp"):
            text = f"unable to create new content in namespace {namespace} because it is being terminated"
            cause = Cause("metadata.namespace", "NamespaceTerminating", f"namespace {namespace} is being terminated")
            raise status_errors.forbidden(group, plural, name, text, [cause])
        metadata["namespace"] = namespace

    def _name(self, resource: Resource, metadata: KubeObject) -> None:
        name, prefix = metadata.get("name"), metadata.get("generateName")
        namespace = metadata.get("namespace", "")
        if not name and isinstance(prefix, str) and prefix:
            while not name or self.store.find(resource.key, namespace, name) is not None:
                name = prefix[:58] + "".join(random.choices(_SUFFIX_LETTERS, k=5))  # noqa: S311 - a name, not a secret
            metadata["name"] = name
        if not isinstance(name, str) or not name:
            cause = status_errors.required("metadata.name", "name or generateName is required")
            raise status_errors.invalid(resource.group, resource.kind, "", [cause])
        if self.store.find(resource.key, namespace, name) is not None:
            raise status_errors.on_object(
                409, "AlreadyExists", "{} already exists", resource.group, resource.plural, name
            )

    def replace(
        self, resource: Resource, old: KubeObject, new: KubeObject, options: WriteOptions, subresource: str = ""
    ) -> KubeObject:
        """Replace an object (PUT). For custom resources, the new object must have a resourceVersion."""
        check_type(resource, new)
        if resource.custom and not new["metadata"].get("resourceVersion"):
            cause = status_errors.invalid_value("metadata.resourceVersion", 0, "must be specified for an update")
            raise status_errors.invalid(resource.group, resource.kind, old["metadata"]["name"], [cause])
        return self.update(resource, old, new, options, subresource)

    def update(
        self,
        resource: Resource,
        old: KubeObject,
        new: KubeObject,
        options: WriteOptions,
        subresource: str = "",
        *,
        applied: bool = False,
    ) -> KubeObject:
        """Replace `old` by `new` under the rules of an update through `subresource` ("" for the object itself).

        Raises:
            ApiError: it is invalid, or based on another state.
        """
        check_type(resource, new)
        check_identity(resource, new, old)
        new = _restricted(resource, old, new, subresource)
        metadata, was = new["metadata"], old["metadata"]
        admit(resource, new, old, options, subresource)
        if options.check is not None:
            options.check(resource, new, old)
        if not applied:
            track_update(resource.node, old, new, _writer(resource, options, subresource), custom=resource.custom)
        if (
            "generation" in was
            and subresource != "status"
            and _generation_fields(resource, new) != _generation_fields(resource, old)
        ):
            metadata["generation"] = was["generation"] + 1
        metadata["resourceVersion"] = was["resourceVersion"]
        if _without_times(new) == _without_times(old):
            return old
        return new if options.dry_run else self.commit(resource, new)

    def apply(
        self,
        resource: Resource,
        place: tuple[str, str],
        config: KubeObject,
        options: WriteOptions,
        subresource: str = "",
    ) -> tuple[KubeObject, bool]:
        """Apply `config` server-side to the object at `place` (namespace, name). Return also whether that created it.

        Raises:
            ApiError: as `create` and `update`, and 409 with one cause per field that another manager owns.
        """
        config = _applicable(resource, place, config, options, subresource)
        live = self.store.copy(resource.key, *place)
        if live is not None:
            live = resource.in_version(live)
        if live is None and (subresource or config["metadata"].get("uid")):
            raise resource.not_found(place[1])
        writer = _writer(resource, options, subresource)
        merged = server_side_apply(resource.node, live, config, writer, force=options.force, custom=resource.custom)
        if live is None:
            return self.create(resource, place[0], merged, options, applied=True), True
        return self.update(resource, live, merged, options, subresource, applied=True), False

    def delete(self, resource: Resource, obj: KubeObject, options: KubeObject) -> tuple[KubeObject, bool]:
        """Delete an object, or begin its deletion. Return its current or last state, and whether it is gone.

        Raises:
            ApiError: 409 if a precondition fails, 403 if it may not be deleted.
        """
        for key, word in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
            wanted, has = (options.get("preconditions") or {}).get(key), obj["metadata"][key]
            if wanted not in (None, has):
                text = f"Precondition failed: {word} in precondition: {wanted}, {word} in object meta: {has}"
                raise resource.conflict(obj["metadata"]["name"], text)
        new = orjson.loads(orjson.dumps(obj))
        metadata, started = new["metadata"], bool(obj["metadata"].get("deletionTimestamp"))
        _set_collection(metadata, options.get("propagationPolicy"))
        grace = resource.rules.grace(new, options.get("gracePeriodSeconds"))
        if not started:
            resource.rules.delete(new)
            _set_deletion(metadata, datetime.datetime.now(datetime.UTC), grace)
            metadata |= {"generation": metadata["generation"] + 1} if "generation" in metadata else {}
        elif resource.rules.graceful and grace < metadata.get("deletionGracePeriodSeconds", 0):
            begun = datetime.timedelta(seconds=metadata["deletionGracePeriodSeconds"])
            _set_deletion(metadata, timestamps.parse(metadata["deletionTimestamp"]) - begun, grace)
        gone = not metadata.get("finalizers") and not resource.rules.deletion_pending(new)
        if options.get("dryRun") or (not gone and new == obj):
            return new, gone
        if gone and not started and not resource.rules.graceful:
            # An object that is removed at once has no deletionTimestamp.
            del metadata["deletionTimestamp"], metadata["deletionGracePeriodSeconds"]
        return self._write(resource, new, gone=gone), gone

    def commit(self, resource: Resource, obj: KubeObject) -> KubeObject:
        """Store an object, or remove it if its deletion waited for this write."""
        metadata = obj["metadata"]
        gone = (
            metadata.get("deletionTimestamp")
            and not metadata.get("finalizers")
            and not resource.rules.deletion_pending(obj)
        )
        return self._write(resource, obj, gone=bool(gone))

    def _write(self, resource: Resource, obj: KubeObject, *, gone: bool) -> KubeObject:
        if not gone and len(orjson.dumps(obj)) > MAX_OBJECT_BYTES:
            raise status_errors.ApiError(500, "", "etcdserver: request is too large")
        stored = (self.store.remove if gone else self.store.put)(resource.key, obj)
        if resource.key == CRDS:
            self._sync_definition(stored, gone=gone)
        elif gone and resource.custom:
            self._finish(resource.key)
        for changed in quota.updated_quotas(self.store, resource, obj):
            self.store.put(quota.QUOTAS, changed)
        return stored

    def _sync_definition(self, crd: KubeObject, *, gone: bool) -> None:
        """Serve the current state of a definition. If it is being deleted, delete its objects first."""
        if gone:
            self.registry.undefine(crd)
            return
        self._serve(crd)
        key = crd_key(crd)
        resource = self.registry.any_version(key)
        if crd["metadata"].get("deletionTimestamp"):
            for obj in list(self.store.all(key)) if resource else ():
                self.delete(resource, obj, {})  # type: ignore[arg-type]  # the list is empty without one
            self._finish(key)

    def _serve(self, crd: KubeObject) -> None:
        """Serve a definition, and apply its current schema to stored objects, as reading them from disk does."""
        self.registry.define(crd)
        group, plural = crd_key(crd)

        def fit(obj: KubeObject) -> None:
            version = obj["apiVersion"].rpartition("/")[2]
            resource = self.registry.get(group, version, plural) or self.registry.any_version((group, plural))
            if resource is not None:
                prune(resource.node, obj)
                apply_defaults(resource.node, obj)

        self.store.transform_all((group, plural), fit)

    def _finish(self, key: ResourceKey) -> None:
        """Remove a definition that is being deleted once none of its objects is left."""
        crd = self.store.copy(CRDS, "", f"{key[1]}.{key[0]}")
        finalizers = (crd or {}).get("metadata", {}).get("finalizers") or []
        terminating = crd is not None and crd["metadata"].get("deletionTimestamp")
        if crd is not None and terminating and CLEANUP_FINALIZER in finalizers and not any(self.store.all(key)):
            crd["metadata"]["finalizers"] = [f for f in finalizers if f != CLEANUP_FINALIZER]
            self.commit(self.registry.builtin(CRDS), crd)


def _restricted(resource: Resource, old: KubeObject, new: KubeObject, subresource: str) -> KubeObject:
    """Return the new object, with every field restored that this kind of write may not change."""
    metadata, was = new["metadata"], old["metadata"]
    editable = {key: value for key, value in metadata.items() if key not in _FIXED}
    new["metadata"] = editable | {key: was[key] for key in _FIXED if key in was}
    copy = orjson.loads(orjson.dumps(old))
    if subresource == "status":
        copy["metadata"]["managedFields"] = metadata.get("managedFields")
        copy.pop("status", None)
        new = {**copy, "status": new["status"]} if "status" in new else copy
    elif subresource == EPHEMERAL:
        copy["metadata"] = {**copy["metadata"], "managedFields": metadata.get("managedFields")}
        added = (new.get("spec") or {}).get("ephemeralContainers") or []
        new = {**copy, "spec": {**copy["spec"], "ephemeralContainers": added}}
    elif resource.has_status:
        new.pop("status", None)
        new |= {"status": copy["status"]} if "status" in copy else {}
    return {**new, "apiVersion": resource.group_version, "kind": resource.kind}


def _applicable(
    resource: Resource, place: tuple[str, str], config: KubeObject, options: WriteOptions, subresource: str
) -> KubeObject:
    """Return the part of an applied configuration that this path may set."""
    if not options.explicit_manager:
        raise invalid_options("PatchOptions", status_errors.required("fieldManager", "is required for apply patch"))
    for key in ("apiVersion", "kind"):
        if not config.get(key):
            raise status_errors.bad_request(f"{key} must be set in an apply patch")
    check_type(resource, config)
    metadata = config["metadata"]
    if metadata.get("managedFields"):
        raise status_errors.bad_request("metadata.managedFields must be nil")
    for key, value in (("namespace", place[0]), ("name", place[1])):
        if value and metadata.setdefault(key, value) != value:
            raise status_errors.bad_request(
                f"metadata.{key} ({metadata[key]}) does not match the one on the URL ({value})"
            )
    if subresource == "status":
        identity = {k: v for k, v in metadata.items() if k in ("name", "namespace", "uid", "resourceVersion")}
        config = {k: v for k, v in config.items() if k in ("apiVersion", "kind", "status")} | {"metadata": identity}
    elif resource.has_status:
        config.pop("status", None)
    unknown = prune(resource.node, config)
    if unknown:
        which = f"{place[0]}/{place[1]}; {resource.group_version}, Kind={resource.kind}"
        text = f".{unknown[0]}: field not declared in schema"
        raise status_errors.bad_request(f"failed to create typed patch object ({which}): {text}")
    return config


def _writer(resource: Resource, options: WriteOptions, subresource: str) -> Writer:
    return Writer(options.manager, subresource, resource.group_version, timestamps.now())


def _generation_fields(resource: Resource, obj: KubeObject) -> KubeObject:
    """Return the part of an object whose changes increment `metadata.generation`."""
    left_out = ("metadata", "status") if resource.has_status else ("metadata",)
    return {key: value for key, value in obj.items() if key not in left_out}


def _without_times(obj: KubeObject) -> KubeObject:
    """Return the object without the times in `managedFields`: a change of only these creates no revision."""
    entries = [{k: v for k, v in e.items() if k != "time"} for e in obj["metadata"].get("managedFields") or ()]
    return {**obj, "metadata": {**obj["metadata"], "managedFields": entries}}


def _set_collection(metadata: KubeObject, policy: str | None) -> None:
    """Set the finalizer that tells the garbage collector what to do with the dependents."""
    if policy is not None:
        wanted = _COLLECTOR_FINALIZERS.get(policy)
        others = [f for f in metadata.pop("finalizers", None) or () if f not in _COLLECTOR_FINALIZERS.values()]
        finalizers = others + ([wanted] if wanted else [])
        metadata |= {"finalizers": finalizers} if finalizers else {}


def _set_deletion(metadata: KubeObject, begun: datetime.datetime, grace: int) -> None:
    ends = (begun + datetime.timedelta(seconds=grace)).strftime("%Y-%m-%dT%H:%M:%SZ")
    metadata.update(deletionTimestamp=ends, deletionGracePeriodSeconds=grace)
