"""Validates a value against its schema: types, limits, formats, list keys, composed schemas and CEL rules.

On an update, errors of unchanged values are ignored (ratcheting): after a schema becomes stricter, objects that were
stored before can still be updated. Exceptions are rules that compare old and new, and rules that cannot be evaluated.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
import re
import uuid
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import orjson

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver import status_errors
from meshwright_local.apiserver.schema.cel import check_rules
from meshwright_local.apiserver.schema.number_bounds import as_go, check_range, is_integer
from meshwright_local.apiserver.schema.structural import FREE, SchemaNode
from meshwright_local.apiserver.status_errors import Cause

MAX_CAUSES = 50
_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": (int, float),
    "number": (int, float),
}
_COMPOSED = {"allOf": "all the schemas", "anyOf": "at least one schema", "oneOf": "one and only one schema"}
_DURATION = re.compile(r"0|[+-]?([0-9]+(\.[0-9]*)?(ns|us|µs|ms|s|m|h))+")
_HOSTNAME = re.compile(r"([a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?)(\.[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?)*")
_FORMATS: dict[str, Callable[[str], object]] = {
    "date-time": lambda text: "T" in text.upper() and datetime.datetime.fromisoformat(text).tzinfo,
    "date": datetime.date.fromisoformat,
    "duration": _DURATION.fullmatch,
    "byte": lambda text: base64.b64decode(text, validate=True) is not None,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "cidr": lambda text: ipaddress.ip_network(text, strict=False),
    "uuid": uuid.UUID,
    "hostname": _HOSTNAME.fullmatch,
    "email": re.compile(r"[^@\s]+@[^@\s]+\.[^@\s]+").fullmatch,
    "uri": lambda text: urlsplit(text).scheme,
}
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def fits_format(form: str, text: str) -> bool:
    """Return whether a string has a format. Unknown formats accept every string, as OpenAPI specifies."""
    try:
        return form not in _FORMATS or bool(_FORMATS[form](text))
    except ValueError:
        return False


@lru_cache(maxsize=4096)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    r"""Compile a pattern with Go's semantics: classes are ASCII, `$` matches only at the end of the text.

    Raises:
        re.error: the pattern cannot be compiled.
    """
    out, in_class, escaped = [], False, False
    for char in pattern:
        plain = not escaped
        out.append(r"\Z" if plain and not in_class and char == "$" else "Z" if escaped and char == "z" else char)
        in_class = (char == "[" or (in_class and char != "]")) if plain else in_class
        escaped = char == "\\" and plain
    return re.compile("".join(out), re.ASCII)


def validate(node: SchemaNode, value: Any, old: Any = None) -> list[Cause]:
    """Return the errors of an object, at most `MAX_CAUSES`; `old` is its previous state, None on a create."""
    causes: list[Cause] = []
    _visit(causes, node, value, old, "")
    return causes[:MAX_CAUSES]


def list_item_key(node: SchemaNode, item: Any) -> str | None:
    """Return the identity of an item of a keyed list or a set, as text; None in an atomic list."""
    if node.list_type == "map" and isinstance(item, dict) and node.items is not None:
        keys = {}
        for name in node.list_keys:
            sub = node.items.properties.get(name)
            fallback = sub.default if sub is not None and isinstance(sub.default, str | int) else None
            keys[name] = item.get(name, fallback)
        return orjson.dumps({k: v for k, v in keys.items() if v is not None}).decode()
    return orjson.dumps(item, option=orjson.OPT_SORT_KEYS).decode() if node.list_type == "set" else None


def _visit(causes: list[Cause], node: SchemaNode, value: Any, old: Any, path: str) -> None:
    if node is FREE or len(causes) >= MAX_CAUSES:
        return
    unchanged = old is not None and value == old
    if unchanged and not node.ruled:
        return
    if not unchanged:
        wrong = _wrong_type(node, value, path)
        if wrong is not None:
            causes.append(wrong)
            if _is_a(value, "number"):
                causes += check_range(node.raw, value, path)
            return
        if node.limited:
            causes += [*_limits(node.raw, value, path), *_composed(node, value, path)]
    if isinstance(value, dict):
        if not unchanged:
            causes += [status_errors.required(f"{path}.{key}".lstrip(".")) for key in node.required if key not in value]
        for key, item in value.items():
            sub = node.child(key)
            if sub is not None:
                was = old.get(key) if isinstance(old, dict) else None
                _visit(causes, sub, item, was, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        _visit_list(causes, node, value, old, path)
    causes += check_rules(node, value, old, path)


def _visit_list(causes: list[Cause], node: SchemaNode, value: list[Any], old: Any, path: str) -> None:
    keyed, unchanged = node.list_type == "map", value == old
    before = {list_item_key(node, item): item for item in old} if keyed and isinstance(old, list) else {}
    seen: set[str] = set()
    for index, item in enumerate(value):
        key = list_item_key(node, item)
        if node.items is not None:
            was = item if unchanged and not keyed else before.get(key)
            _visit(causes, node.items, item, was, f"{path}[{index}]")
        if key is not None:
            if key in seen and not unchanged:
                causes.append(Cause(f"{path}[{index}]", "FieldValueDuplicate", f"Duplicate value: {key}"))
            seen.add(key)


def _wrong_type(node: SchemaNode, value: Any, path: str) -> Cause | None:
    wanted = node.type or "object"
    if node.int_or_string:
        wanted = "integer or string"
        good = isinstance(value, int | str) or (node.quantity and isinstance(value, float))
        good = good and not isinstance(value, bool)
    elif value is None:
        good = node.nullable or node.type is None
    else:
        good = node.type is None or _is_a(value, node.type)
    if good:
        return None
    found = "null" if value is None else _JSON_TYPES[type(as_go(value) if _is_a(value, "number") else value)]
    if isinstance(value, int | float) and found == "number" and node.raw.get("format"):
        wanted, found = node.raw["format"], "float64"
    text = f'{path} in body must be of type {wanted}: "{found}"'
    return Cause(path or "<nil>", "FieldValueTypeInvalid", f'Invalid value: "{found}": {text}')


def _is_a(value: Any, kind: str) -> bool:
    if isinstance(value, bool) or kind == "boolean":
        return isinstance(value, bool) and kind == "boolean"
    return isinstance(value, _TYPES.get(kind, ())) and (kind != "integer" or is_integer(value))


def _limits(raw: KubeObject, value: Any, path: str) -> list[Cause]:
    """Return the errors of a value in enum, length, size, pattern, format and range, as the real server words them."""
    said = f"{path} in body"
    causes: list[Cause] = []
    if "enum" in raw and value not in raw["enum"] and not (value is None and raw.get("nullable")):
        causes.append(status_errors.unsupported_value(path, value, raw["enum"]))
    if isinstance(value, str):
        if len(value) > raw.get("maxLength", len(value)):
            text = f"Too long: may not be more than {raw['maxLength']} bytes"
            causes.append(Cause(path, "FieldValueTooLong", text))
        if len(value) < raw.get("minLength", 0):
            causes.append(
                status_errors.invalid_value(path, value, f"{said} should be at least {raw['minLength']} chars long")
            )
        if "pattern" in raw and not _matches(raw["pattern"], value):
            causes.append(status_errors.invalid_value(path, value, f"{said} should match '{raw['pattern']}'"))
        if "format" in raw and not fits_format(raw["format"], value):
            causes.append(
                status_errors.invalid_value(
                    path, value, f"{said} must be of type {raw['format']}: {status_errors.format_value(value)}"
                )
            )
    elif isinstance(value, list | dict):
        word = "Items" if isinstance(value, list) else "Properties"
        if len(value) > raw.get(f"max{word}", len(value)):
            text = f"Too many: {len(value)}: must have at most {raw[f'max{word}']} items"
            causes.append(Cause(path, "FieldValueTooMany", text))
        if len(value) < raw.get(f"min{word}", 0):
            text = f"{said} should have at least {raw[f'min{word}']} {word.lower()}"
            causes.append(status_errors.invalid_value(path, len(value), text))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        causes += check_range(raw, value, path)
    return causes


def _matches(pattern: str, value: str) -> bool:
    try:
        return compile_pattern(pattern).search(value) is not None
    except re.error:  # some patterns of built-in types are valid only in Go
        return True


def _composed(node: SchemaNode, value: Any, path: str) -> list[Cause]:
    causes = []
    for keyword, words in _COMPOSED.items():
        if not (node.int_or_string and keyword == "anyOf") and not _composes(node.raw, keyword, value):
            causes.append(status_errors.invalid_value(path, value, f'"{path}" must validate {words} ({keyword})'))
    if "not" in node.raw and _accepts(node.raw["not"], value):
        causes.append(status_errors.invalid_value(path, value, f'"{path}" must not validate the schema (not)'))
    return causes


def _composes(raw: KubeObject, keyword: str, value: Any) -> bool:
    branches = raw.get(keyword) or ()
    good = sum(_accepts(branch, value) for branch in branches)
    return not branches or {"allOf": good == len(branches), "anyOf": good > 0, "oneOf": good == 1}[keyword]


def _accepts(raw: KubeObject, value: Any) -> bool:
    """Return whether a value-only schema (inside allOf, anyOf, oneOf, not) accepts a value."""
    if ("type" in raw and not _is_a(value, raw["type"])) or _limits(raw, value, ""):
        return False
    if isinstance(value, dict):
        properties = raw.get("properties") or {}
        if any(key not in value for key in raw.get("required") or ()):
            return False
        if not all(_accepts(sub, value[key]) for key, sub in properties.items() if key in value):
            return False
    if isinstance(value, list) and not all(_accepts(raw.get("items") or {}, item) for item in value):
        return False
    composed = all(_composes(raw, keyword, value) for keyword in _COMPOSED)
    return composed and not ("not" in raw and _accepts(raw["not"], value))
