"""Request bodies: objects in JSON, YAML or protobuf, and the three kinds of patch other than apply.

kubectl's typed commands (create, auth can-i, drain) send protobuf without a fallback, so this module decodes it.
`data/proto.json.gz` maps the field numbers of the built-in types' protobuf messages to JSON names: type -> number ->
(name, type, label). Responses are JSON, which every client accepts. Apply is in `registry/server_side_apply.py`.
"""

from __future__ import annotations

import base64
import datetime
import gzip
import re
import struct
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import jsonpatch  # type: ignore[import-untyped, unused-ignore]
import orjson
import yaml

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver import duplicate_keys
from meshwright_local.apiserver.duplicate_keys import DuplicateKeys
from meshwright_local.apiserver.schema.structural import FREE, SchemaNode
from meshwright_local.apiserver.status_errors import ApiError, bad_request, unsupported_media_type

JSON, YAML, PROTOBUF = "application/json", "application/yaml", "application/vnd.kubernetes.protobuf"
JSON_PATCH, MERGE_PATCH = "application/json-patch+json", "application/merge-patch+json"
STRATEGIC_PATCH, APPLY_PATCH = "application/strategic-merge-patch+json", "application/apply-patch+yaml"
MAX_BODY_BYTES = 3 * 1024 * 1024
MAX_OPERATIONS = 10000
_MAGIC = b"k8s\0"
_META = "k8s.io.apimachinery.pkg.apis.meta.v1."
# Messages whose fields JSON has in the object around them.
_INLINED = (
    *("ephemeralContainerCommon", "handler", "ingressRuleValue", "localObjectReference"),
    *("persistentVolumeSource", "volumeSource"),
)
_MALFORMED = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError, struct.error)
_PATCH_ERRORS = (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException, TypeError, KeyError, ValueError)


class _Loader(yaml.CSafeLoader):
    """Loads YAML as the real server does: dates stay text, and `y` and `n` are booleans."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.CSafeLoader.yaml_implicit_resolvers.items()
    }
    bool_values = {**yaml.CSafeLoader.bool_values, "y": True, "n": False}


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^[yYnN]$"), list("yYnN"))


def parse_object(content_type: str, raw: bytes) -> KubeObject:
    """Decode the object in the body of a create or replace.

    Raises:
        ApiError: 400 if it is not an object, 415 for another content type.
    """
    if content_type not in ("", JSON, YAML, PROTOBUF):
        raise unsupported_media_type((JSON, YAML, PROTOBUF))
    value = parse(content_type, raw)
    if not isinstance(value, dict):
        raise bad_request("the object provided is unrecognized: the body must hold one object")
    return value


def with_duplicates(content_type: str, raw: bytes, value: Any, *, custom: bool) -> tuple[Any, DuplicateKeys]:
    """Return the keys that a body has twice, and its value with respect to them."""
    if content_type == PROTOBUF or raw[:4] == _MAGIC:
        return value, DuplicateKeys()
    if _is_yaml(content_type, raw):
        return value, duplicate_keys.in_yaml(raw, _Loader)
    value, found = duplicate_keys.in_json(raw, value, typed=not custom and "patch" not in content_type)
    if found.paths and content_type == APPLY_PATCH:
        found = duplicate_keys.in_yaml(raw, _Loader)
    if content_type == JSON_PATCH:
        found.prefix = "json patch "
    return value, found


def _is_yaml(content_type: str, raw: bytes) -> bool:
    return "yaml" in content_type and raw.lstrip()[:1] not in (b"{", b"[")


def parse(content_type: str, raw: bytes) -> Any:
    """Decode the value in a body.

    Raises:
        ApiError: 400 if it cannot be decoded.
    """
    try:
        if content_type == PROTOBUF or raw[:4] == _MAGIC:
            return _decode(raw)
        if _is_yaml(content_type, raw):
            value = yaml.load(raw, Loader=_Loader)  # noqa: S506 - derived from the safe loader
            return orjson.loads(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS))
        return orjson.loads(raw)
    except (*_MALFORMED, yaml.YAMLError) as error:
        raise bad_request(f"the object provided is unrecognized: {error}") from None


@lru_cache(maxsize=1)
def _table() -> dict[str, dict[str, list[str]]]:
    packed = files("meshwright_local.apiserver").joinpath("data", "proto.json.gz").read_bytes()
    table: dict[str, dict[str, list[str]]] = orjson.loads(gzip.decompress(packed))
    return table


def _decode(raw: bytes) -> KubeObject:
    if raw[:4] != _MAGIC:
        raise ValueError("the body does not begin with the Kubernetes protobuf prefix")
    envelope = dict(_fields(raw[4:]))
    names = {number: value.decode() for number, value in _fields(envelope.get(1, b""))}
    api_version, kind = names.get(1, ""), names.get(2, "")
    group, _, version = api_version.rpartition("/")
    name = f"k8s.io.api.{group.split('.')[0] or 'core'}.{version}.{kind}"
    body = _message(name if name in _table() else _META + kind, envelope.get(2, b""))
    if not isinstance(body, dict):
        raise ValueError(f"the protobuf body contains a {kind}, which is not an object")
    return {"apiVersion": api_version, "kind": kind, **body}


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("a number is too long")


def _fields(data: bytes) -> list[tuple[int, Any]]:
    """Yield a message's numbered fields, not decoded (protobuf encoding: varint 0, 64 bit 1, bytes 2, 32 bit 5)."""
    out: list[tuple[int, Any]] = []
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        value: Any
        if tag & 7 == 0:
            value, at = _varint(data, at)
        elif tag & 7 == 2:
            size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
        else:
            form, size = {1: ("<d", 8), 5: ("<f", 4)}[tag & 7]
            value, at = struct.unpack(form, data[at : at + size])[0], at + size
        if at > len(data):
            raise ValueError("a field is longer than its message")
        out.append((tag >> 3, value))
    return out


def _value(kind: str, value: Any) -> Any:
    if kind in _table():
        return _message(kind, value)
    if kind == "string":
        return value.decode()
    if kind == "bytes":
        return base64.b64encode(value).decode()
    if kind in ("int32", "int64"):
        return value - (1 << 64) if value >> 63 else value
    return bool(value) if kind == "bool" else value


def _message(kind: str, data: bytes) -> Any:
    parts = _fields(data)
    fields, short = dict(parts), kind.rsplit(".", 1)[-1]
    if short in ("Time", "MicroTime") and kind.startswith(_META):
        moment = datetime.datetime.fromtimestamp(fields.get(1) or 0, datetime.UTC)
        return moment.strftime("%Y-%m-%dT%H:%M:%SZ") if fields.get(1) else None
    if short == "Quantity":
        return fields.get(1, b"").decode()
    if short == "IntOrString":
        return fields.get(3, b"").decode() if fields.get(1) else _value("int32", fields.get(2, 0))
    if short in ("FieldsV1", "RawExtension", "JSON"):
        return orjson.loads(fields.get(1) or b"null")
    out: KubeObject = {}
    known = _table()[kind]
    for number, value in parts:
        name, sub, label = known.get(str(number), ("", "", ""))
        if label == "map":
            pair = dict(_fields(value))
            out.setdefault(name, {})[pair.get(1, b"").decode()] = _value(sub, pair.get(2, b""))
        elif label == "repeated":
            out.setdefault(name, []).append(_value(sub, value))
        elif name in _INLINED:
            out |= _value(sub, value)
        elif name and (item := _value(sub, value)) not in ("", None, {}):
            out[name] = item
    wraps_a_list = list(known.values()) == [["items", "string", "repeated"]]
    return out.get("items", []) if wraps_a_list else out


def parse_patch(content_type: str, raw: bytes, *, custom: bool) -> Any:
    """Decode the patch in a body. Custom resources do not support strategic merge patches.

    Raises:
        ApiError: 400 if it cannot be decoded, 413 for too many operations, 415 for another content type.
    """
    accepted = [JSON_PATCH, MERGE_PATCH, APPLY_PATCH] + ([] if custom else [STRATEGIC_PATCH])
    if content_type not in accepted:
        raise unsupported_media_type(accepted)
    patch = parse(YAML if content_type == APPLY_PATCH else JSON, raw)
    if not isinstance(patch, list if content_type == JSON_PATCH else dict):
        wanted = (
            "a JSON patch must be a list of operations" if content_type == JSON_PATCH else "the patch must be an object"
        )
        raise bad_request(f"error decoding patch: {wanted}")
    if len(patch) > MAX_OPERATIONS:
        text = f"The allowed maximum operations in a JSON patch is {MAX_OPERATIONS}, got {len(patch)}"
        raise ApiError(413, "RequestEntityTooLarge", text)
    return patch


def patched(node: SchemaNode, content_type: str, obj: KubeObject, patch: Any) -> KubeObject:
    """Return the object after a patch (not apply). It shares no data with `obj`.

    Raises:
        ApiError: 400 for an invalid patch, 422 for a patch that does not fit the object.
    """
    copy: KubeObject = orjson.loads(orjson.dumps(obj))
    if content_type == JSON_PATCH:
        return _json_patched(copy, patch)
    merged = strategic_merge_patch(node, copy, patch) if content_type == STRATEGIC_PATCH else merge_patch(copy, patch)
    result: KubeObject = orjson.loads(orjson.dumps(merged))
    return result


class _Replace(jsonpatch.ReplaceOperation):  # type: ignore[misc, unused-ignore]
    """Sets a field, also one that is missing: the real server's library does not look."""

    def apply(self, obj: Any) -> Any:
        """Return the object after the operation."""
        parent, key = self.pointer.to_last(obj)
        if not isinstance(parent, dict) or key is None:
            return super().apply(obj)
        parent[key] = self.operation["value"]
        return obj


class _Test(jsonpatch.TestOperation):  # type: ignore[misc, unused-ignore]
    """Compares a field. A missing one is equal to null."""

    def apply(self, obj: Any) -> Any:
        """Return the object; raises JsonPatchTestFailed if it differs."""
        parent, key = self.pointer.to_last(obj)
        missing = isinstance(parent, dict) and key is not None and key not in parent
        return obj if missing and self.operation.get("value", 0) is None else super().apply(obj)


class _JsonPatch(jsonpatch.JsonPatch):  # type: ignore[misc, unused-ignore]
    operations = MappingProxyType({**jsonpatch.JsonPatch.operations, "replace": _Replace, "test": _Test})


def _json_patched(obj: KubeObject, operations: list[Any]) -> KubeObject:
    try:
        patch = _JsonPatch(operations)
    except (*_PATCH_ERRORS, AttributeError) as error:
        raise bad_request(f"error decoding patch: {error}") from None
    try:
        result = patch.apply(obj, in_place=True)
    except _PATCH_ERRORS as error:
        text = f"the server rejected our request due to an error in our request: {error}"
        raise ApiError(422, "Invalid", text) from None
    if not isinstance(result, dict):
        raise ApiError(422, "Invalid", "the server rejected our request: the result of the patch is not an object")
    return result


def merge_patch(target: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7386) to `target`; null removes. Changes neither argument."""
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
    """Apply a strategic merge patch, which merges lists by keys of the schema. Changes neither argument.

    Raises:
        ApiError: 400 for a directive that is unknown or does not fit.
    """
    if not isinstance(patch, dict):
        return patch
    directive = patch.get("$patch", "merge")
    if directive not in ("merge", "replace", "delete"):
        raise bad_request(f"unknown patch type found: {directive}")
    if directive != "merge":
        return {key: value for key, value in patch.items() if key != "$patch"} if directive == "replace" else {}
    out = dict(target) if isinstance(target, dict) else {}
    if "$retainKeys" in patch:
        out = {key: value for key, value in out.items() if key in patch["$retainKeys"]}
    for key, value in patch.items():
        if key.startswith("$deleteFromPrimitiveList/"):
            name = key.partition("/")[2]
            out[name] = [item for item in out.get(name) or [] if item not in value]
        elif value is None and not key.startswith("$"):
            out.pop(key, None)
        elif not key.startswith("$"):
            sub, live = node.child(key) or FREE, out.get(key)
            if isinstance(value, list) and sub.merges:
                order = patch.get(f"$setElementOrder/{key}")
                order = order if isinstance(order, list) else value
                out[key] = _strategic_list(sub, live if isinstance(live, list) else [], value, order)
            else:
                out[key] = strategic_merge_patch(sub, live, value)
    return out


def _strategic_list(node: SchemaNode, live: list[Any], patch: list[Any], order: list[Any]) -> list[Any]:
    key = node.merge_key
    if not key:
        return _ordered(live + [item for item in patch if item not in live], live, order, key)
    if any(not isinstance(item, dict) for item in patch):
        raise bad_request(f"items of this list must be objects with the field {key}")
    if any(item.get("$patch") == "replace" for item in patch):
        return [item for item in patch if "$patch" not in item]
    out = list(live)
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
    return _ordered(out, live, order, key)


def _ordered(merged: list[Any], live: list[Any], order: Any, key: str) -> list[Any]:
    """Return the merged items in the order of the patch, with other items at their position in the live list.

    As in the real server, an item that is not in the patch comes before the first item that follows it in the live
    list. A new item therefore comes first, unless the patch has other items before it.
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
