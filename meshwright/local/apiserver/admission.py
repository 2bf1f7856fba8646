"""Admission: an object made to fit its kind, or refused with all that is wrong with it."""

from __future__ import annotations

from typing import Any

from meshwright.local.apiserver.errors import Cause, bad_request, invalid, invalid_value, not_allowed
from meshwright.local.apiserver.objectmeta import check_metadata
from meshwright.local.apiserver.options import WriteOptions
from meshwright.local.apiserver.quantity import canonicalize
from meshwright.local.apiserver.resources import Resource
from meshwright.local.apiserver.schema.node import SchemaNode
from meshwright.local.apiserver.schema.pruning import apply_defaults, prune
from meshwright.local.apiserver.schema.validation import validate

_ZERO: dict[str, Any] = {"string": "", "integer": 0, "number": 0, "boolean": False}


def check_type(resource: Resource, obj: dict[str, Any]) -> None:
    """Refuse an object of another kind or version than the path's; fill in what is left out.

    Raises:
        ApiError: 400.
    """
    version, kind = obj.setdefault("apiVersion", resource.group_version), obj.setdefault("kind", resource.kind)
    if version != resource.group_version:
        raise bad_request(
            f"the API version in the data ({version}) does not match the expected API version "
            f"({resource.group_version})"
        )
    if kind != resource.kind:
        raise bad_request(f"the kind in the data ({kind}) does not match the expected kind ({resource.kind})")
    if not isinstance(obj.setdefault("metadata", {}), dict):
        raise bad_request(f"{resource.kind}.metadata must be an object")


def drop_unknown_fields(resource: Resource, obj: dict[str, Any], options: WriteOptions) -> None:
    """Prune in place; unknown fields are an error, a warning or nothing, by the field validation that was asked for.

    Raises:
        ApiError: 400 under strict validation.
    """
    dropped = [f'unknown field "{path}"' for path in prune(resource.node, obj)]
    if dropped and options.field_validation == "Strict":
        raise bad_request(
            f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}: '
            f"strict decoding error: {', '.join(dropped)}"
        )
    if options.field_validation == "Warn":
        options.warnings += dropped


def admit(
    resource: Resource, obj: dict[str, Any], old: dict[str, Any] | None, options: WriteOptions, subresource: str = ""
) -> None:
    """Prune, default and check an object in place.

    Raises:
        ApiError: 400 for a value of the wrong type in a built-in kind, 422 for everything else that is wrong.
    """
    drop_unknown_fields(resource, obj, options)
    if resource.custom:
        _fit_custom(resource, obj)
        causes = validate(resource.node, obj, old)
    else:
        causes = _fit_builtin(resource, obj, old)
    for key in ("finalizers", "ownerReferences", "labels", "annotations"):
        if key in obj["metadata"] and not obj["metadata"][key]:
            del obj["metadata"][key]
    causes += check_metadata(obj["metadata"], resource.rules.name_form)
    if not causes:
        if old is not None:
            resource.rules.on_update(obj, old, subresource)
        causes = resource.rules.validate(obj, old, subresource)
    if causes:
        raise invalid(resource.group, resource.kind, obj["metadata"].get("name", ""), causes)


def _fit_custom(resource: Resource, obj: dict[str, Any]) -> None:
    apply_defaults(resource.node, obj)
    wrong = validate(resource.node.properties["metadata"], obj["metadata"])
    if wrong:
        raise bad_request(f"{resource.kind}.metadata: {wrong[0].field}: {wrong[0].message}")


def _fit_builtin(resource: Resource, obj: dict[str, Any], old: dict[str, Any] | None) -> list[Cause]:
    """Types first, as decoding into a struct does; then defaults, which may rely on them."""
    zero_fill(resource.node.properties.get("status"), obj.get("status"))
    causes = validate(resource.node, obj, old)
    wrong = next((c for c in causes if c.reason == "FieldValueTypeInvalid"), None)
    if wrong is not None:
        raise bad_request(
            f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}: '
            f"json: cannot unmarshal {wrong.field}: {wrong.message}"
        )
    apply_defaults(resource.node, obj)
    causes += [invalid_value(path, "", problem) for path, problem in canonicalize(resource.node, obj)]
    causes = [c for c in causes if not (c.field.startswith("status") and c.reason == "FieldValueRequired")]
    if not causes:
        resource.rules.set_defaults(obj)
    return causes


def zero_fill(node: SchemaNode | None, value: Any) -> None:
    """Give required scalars that are missing their zero value in place, as Go's structs do in what a status reports."""
    if node is None:
        return
    if isinstance(value, dict):
        for key in node.required:
            sub = node.properties.get(key)
            if key not in value and sub is not None and sub.type in _ZERO and "enum" not in sub.raw:
                value[key] = _ZERO[sub.type] if sub.raw.get("format") != "date-time" else None
        for key, item in value.items():
            zero_fill(node.child(key), item)
    elif isinstance(value, list):
        for item in value:
            zero_fill(node.items, item)


def check_identity(resource: Resource, new: dict[str, Any], old: dict[str, Any]) -> None:
    """Refuse an update that speaks of another object than the path's, or of an older state of it.

    Raises:
        ApiError: 400 for another name or namespace, 409 for another uid or revision.
    """
    metadata, was = new["metadata"], old["metadata"]
    for key, word in (("name", "name"), ("namespace", "namespace")):
        if metadata.get(key) not in (None, "", was.get(key)):
            raise bad_request(
                f"the {word} of the object ({metadata[key]}) does not match the {word} on the URL ({was.get(key)})"
            )
    if metadata.get("uid") not in (None, "", was["uid"]):
        text = f"Precondition failed: UID in precondition: {metadata['uid']}, UID in object meta: {was['uid']}"
        raise resource.conflict(was["name"], text)
    if metadata.get("resourceVersion") not in (None, "", "0", was["resourceVersion"]):
        text = "the object has been modified; please apply your changes to the latest version and try again"
        raise resource.conflict(was["name"], text)


def check_finalizers(resource: Resource, new: dict[str, Any], old: dict[str, Any]) -> None:
    """Refuse new finalizers on an object that is being deleted.

    Raises:
        ApiError: 422.
    """
    if not old["metadata"].get("deletionTimestamp"):
        return
    added = set(new["metadata"].get("finalizers") or ()) - set(old["metadata"].get("finalizers") or ())
    if added:
        text = f"no new finalizers can be added if the object is being deleted, found new finalizers {sorted(added)}"
        cause = not_allowed("metadata.finalizers", text)
        raise invalid(resource.group, resource.kind, old["metadata"]["name"], [cause])
