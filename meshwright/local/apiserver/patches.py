"""The three patches beside apply: JSON patch (RFC 6902), JSON merge patch (RFC 7386), strategic merge patch."""

from __future__ import annotations

from typing import Any

import jsonpatch  # type: ignore[import-untyped, unused-ignore]

from meshwright.local.apiserver.errors import ApiError, bad_request
from meshwright.local.apiserver.schema.node import FREE, SchemaNode

MAX_OPERATIONS = 10000


def json_patch(obj: dict[str, Any], operations: Any) -> dict[str, Any]:
    """Apply a list of operations; `obj` is changed in place.

    Raises:
        ApiError: 400 for what is no patch, 413 for too many operations, 422 for one that does not fit the object.
    """
    if not isinstance(operations, list):
        raise bad_request("error decoding patch: a JSON patch is a list of operations")
    if len(operations) > MAX_OPERATIONS:
        text = f"The allowed maximum operations in a JSON patch is {MAX_OPERATIONS}, got {len(operations)}"
        raise ApiError(413, "RequestEntityTooLarge", text)
    try:
        patch = jsonpatch.JsonPatch(operations)
    except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException, TypeError, AttributeError) as error:
        raise bad_request(f"error decoding patch: {error}") from None
    try:
        result = patch.apply(obj, in_place=True)
    except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException, TypeError, KeyError, ValueError) as error:
        text = f"the server rejected our request due to an error in our request: {error}"
        raise ApiError(422, "Invalid", text) from None
    if not isinstance(result, dict):
        raise ApiError(422, "Invalid", "the server rejected our request: the patch leaves no object")
    return result


def merge_patch(target: Any, patch: Any) -> Any:
    """`target` with `patch` laid over it; null removes. Neither is changed."""
    if not isinstance(patch, dict):
        return patch
    out = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            out.pop(key, None)
        else:
            out[key] = merge_patch(out.get(key), value)
    return out


def strategic_merge_patch(node: SchemaNode, target: Any, patch: Any) -> Any:
    """A merge patch that knows which lists are merged, and by which key. Neither argument is changed.

    Raises:
        ApiError: 400 for a directive that is not known or does not fit.
    """
    if not isinstance(patch, dict):
        return patch
    directive = patch.get("$patch", "merge")
    if directive == "replace":
        return {key: value for key, value in patch.items() if key != "$patch"}
    if directive == "delete":
        return {}
    if directive != "merge":
        raise bad_request(f"unknown patch type found: {directive}")
    out = dict(target) if isinstance(target, dict) else {}
    if "$retainKeys" in patch:
        out = {key: value for key, value in out.items() if key in patch["$retainKeys"]}
    for key, value in patch.items():
        if key.startswith("$deleteFromPrimitiveList/"):
            name = key.partition("/")[2]
            out[name] = [item for item in out.get(name) or [] if item not in value]
        if key.startswith("$"):
            continue
        if value is None:
            out.pop(key, None)
        else:
            order = patch.get(f"$setElementOrder/{key}")
            out[key] = _strategic_field(node.child(key) or FREE, out.get(key), value, order)
    return out


def _strategic_field(node: SchemaNode, target: Any, value: Any, order: Any) -> Any:
    if isinstance(value, list) and node.merges:
        live = target if isinstance(target, list) else []
        merged = _strategic_list(node, live, value)
        return _ordered(merged, live, order if isinstance(order, list) else value, node.merge_key)
    if isinstance(value, dict):
        return strategic_merge_patch(node, target, value)
    return value


def _strategic_list(node: SchemaNode, target: list[Any], patch: list[Any]) -> list[Any]:
    key = node.merge_key
    if not key:
        return target + [item for item in patch if item not in target]
    if any(not isinstance(item, dict) for item in patch):
        raise bad_request(f"items of this list must be objects with the field {key}")
    if any(item.get("$patch") == "replace" for item in patch):
        return [item for item in patch if "$patch" not in item]
    out = list(target)
    for item in patch:
        if key not in item:
            raise bad_request(f"map: {sorted(item)} does not contain declared merge key: {key}")
        at = next((i for i, present in enumerate(out) if present.get(key) == item[key]), None)
        if item.get("$patch") == "delete":
            out = [present for present in out if present.get(key) != item[key]]
        elif at is None:
            out.append({k: v for k, v in item.items() if not k.startswith("$")})
        else:
            out[at] = strategic_merge_patch(node.items or FREE, out[at], item)
    return out


def _ordered(merged: list[Any], live: list[Any], order: list[Any], key: str) -> list[Any]:
    """Merged items in the order of the patch, with those that it does not name put where they stood among the others.

    As in the real server: an item that the patch does not name comes before the first one that it stood before in the
    live list. So an item that is new comes first of all, unless the patch names others before it.
    """

    def name(item: Any) -> Any:
        return item.get(key) if isinstance(item, dict) else item

    wanted, stood = [name(item) for item in order], [name(item) for item in live]
    named = sorted((item for item in merged if name(item) in wanted), key=lambda item: wanted.index(name(item)))
    others = [item for item in merged if name(item) not in wanted]
    out: list[Any] = []
    while named and others:
        other, next_named = name(others[0]), name(named[0])
        first = other in stood and next_named in stood and stood.index(other) < stood.index(next_named)
        out.append((others if first else named).pop(0))
    return out + named + others
