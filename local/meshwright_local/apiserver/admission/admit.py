"""Admission: prunes, defaults and validates an object, or rejects it with all its errors."""

from __future__ import annotations

from typing import Any

import orjson

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver.admission.metadata import check_finalizers, check_metadata
from meshwright_local.apiserver.duplicate_keys import DuplicateKeys
from meshwright_local.apiserver.query_options import WriteOptions
from meshwright_local.apiserver.resource_types import Resource
from meshwright_local.apiserver.schema.structural import SchemaNode, apply_defaults, canonicalize, drop_empty, prune
from meshwright_local.apiserver.schema.validation import validate
from meshwright_local.apiserver.status_errors import ApiError, Cause, UnreadableError, bad_request, invalid, not_allowed

_CRDS = ("apiextensions.k8s.io", "customresourcedefinitions")
_ZERO: dict[Any, Any] = {"string": "", "integer": 0, "number": 0, "boolean": False}


def check_type(resource: Resource, obj: KubeObject) -> None:
    """Reject an object of another kind or version than the path's. Fill in fields that are left out."""
    version, kind = obj.setdefault("apiVersion", resource.group_version), obj.setdefault("kind", resource.kind)
    if version != resource.group_version:
        expected = f"the expected API version ({resource.group_version})"
        raise bad_request(f"the API version in the data ({version}) does not match {expected}")
    if kind != resource.kind:
        raise bad_request(f"the kind in the data ({kind}) does not match the expected kind ({resource.kind})")
    if not isinstance(obj.setdefault("metadata", {}), dict):
        raise bad_request(f"{resource.kind}.metadata must be an object")


def check_place(key: str, obj: KubeObject, expected: Any) -> None:
    """Reject an object whose name or namespace is not that of the path."""
    given = obj["metadata"].get(key)
    if given not in (None, "", expected):
        raise bad_request(f"the {key} of the object ({given}) does not match the {key} on the URL ({expected})")


def check_identity(resource: Resource, new: KubeObject, old: KubeObject) -> None:
    """Reject an update of another object than the path's, or of an older state of it."""
    metadata, was = new["metadata"], old["metadata"]
    for key in ("name", "namespace"):
        check_place(key, new, was.get(key))
    if metadata.get("uid") not in (None, "", was["uid"]):
        text = f"Precondition failed: UID in precondition: {metadata['uid']}, UID in object meta: {was['uid']}"
        raise resource.conflict(was["name"], text)
    if metadata.get("resourceVersion") not in (None, "", "0", was["resourceVersion"]):
        text = "the object has been modified; please apply your changes to the latest version and try again"
        raise resource.conflict(was["name"], text)


def admit(resource: Resource, obj: KubeObject, old: KubeObject | None, options: WriteOptions, subresource: str) -> None:
    """Prune, default and validate an object in place.

    Raises:
        ApiError: 400 for a value of the wrong type in a built-in kind, 422 for all other errors.
    """
    drop_unknown_fields(resource, obj, options)
    causes = _prepare_custom(resource, obj, old) if resource.custom else _prepare_builtin(resource, obj, old)
    metadata, was = obj["metadata"], (old or {}).get("metadata", {})
    if metadata.get("ownerReferences"):
        owners = [orjson.dumps(owner, option=orjson.OPT_SORT_KEYS) for owner in metadata["ownerReferences"]]
        metadata["ownerReferences"] = [orjson.loads(owner) for owner in dict.fromkeys(owners)]
    for key in ("finalizers", "ownerReferences", "labels", "annotations"):
        if key in metadata and not metadata[key]:
            del metadata[key]
    added = sorted({*(metadata.get("finalizers") or ())} - {*(was.get("finalizers") or ())})
    if was.get("deletionTimestamp") and added:
        text = f"no new finalizers can be added if the object is being deleted, found new finalizers {added}"
        causes.append(not_allowed("metadata.finalizers", text))
    causes += check_metadata(metadata, resource.rules.name_form)
    if not resource.custom and resource.key != _CRDS:
        causes += check_finalizers(metadata)
    if not causes and old is not None:
        resource.rules.update(obj, old, subresource)
    causes = causes or resource.rules.check(obj, old, subresource)
    if causes:
        error = invalid(resource.group, resource.kind, metadata.get("name", ""), causes)
        error.warnings = options.warnings
        raise error


def drop_unknown_fields(resource: Resource, obj: KubeObject, options: WriteOptions) -> None:
    """Prune in place. Unknown and duplicate fields are errors, warnings or ignored, by the requested validation."""
    dropped, duplicates = list(prune(resource.node, obj)), options.duplicates or DuplicateKeys()
    if options.field_validation == "Strict" and (errors := duplicates.errors(dropped)):
        raise _unreadable(resource, f"strict decoding error: {', '.join(errors)}")
    if options.field_validation == "Warn":
        options.warnings += duplicates.warnings(dropped)


def _unreadable(resource: Resource, why: str) -> ApiError:
    return UnreadableError(resource.kind, resource.version, why)


def _prepare_custom(resource: Resource, obj: KubeObject, old: KubeObject | None) -> list[Cause]:
    apply_defaults(resource.node, obj)
    wrong = validate(resource.node.properties["metadata"], obj["metadata"])
    if wrong:
        raise bad_request(f"{resource.kind}.metadata: {wrong[0].field}: {wrong[0].message}")
    return validate(resource.node, obj, old)


def _prepare_builtin(resource: Resource, obj: KubeObject, old: KubeObject | None) -> list[Cause]:
    """Check types first, as decoding into a Go struct does, then set defaults, which may depend on them."""
    _zero_fill(resource.node.properties.get("status"), obj.get("status"))
    causes = validate(resource.node, obj, old)
    wrong = next((c for c in causes if c.reason == "FieldValueTypeInvalid" or c.field == "<nil>"), None)
    if wrong is not None:
        raise _unreadable(resource, f"json: cannot unmarshal {wrong.field}: {wrong.message}")
    apply_defaults(resource.node, obj)
    # The keys of their lists are for merging. The rules of a kind say which must be unique: an environment may repeat.
    causes = [cause for cause in causes if cause.reason != "FieldValueDuplicate"]
    if resource.key != _CRDS:
        drop_empty(resource.node, obj)
    causes += canonicalize(resource.node, obj)
    causes = [c for c in causes if not (c.field.startswith("status") and c.reason == "FieldValueRequired")]
    if not causes:
        resource.rules.defaults(obj)
    return causes


def _zero_fill(node: SchemaNode | None, value: Any) -> None:
    """Set missing required scalars to their zero value in place, as Go's structs do in a status."""
    if node is not None and isinstance(value, dict):
        for key in node.required:
            sub = node.properties.get(key)
            if key not in value and sub is not None and sub.type in _ZERO and "enum" not in sub.raw:
                value[key] = _ZERO[sub.type] if sub.raw.get("format") != "date-time" else None
        for key, item in value.items():
            _zero_fill(node.child(key), item)
    elif node is not None and isinstance(value, list):
        for item in value:
            _zero_fill(node.items, item)
