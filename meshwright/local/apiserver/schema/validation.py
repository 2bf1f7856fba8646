"""Checking a value against its schema: types, limits, formats, list keys, composed schemas and CEL rules.

On an update, what did not change is not held against the writer (ratcheting): a schema that became stricter does not
lock the objects that were stored before. Only rules that compare old with new are asked again.
"""

from __future__ import annotations

from typing import Any

import orjson

from meshwright.local.apiserver.errors import Cause, invalid_value, required, shown
from meshwright.local.apiserver.schema import limits
from meshwright.local.apiserver.schema.cel import check_rule, compile_expression
from meshwright.local.apiserver.schema.node import SchemaNode

MAX_CAUSES = 50
_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": (int, float),
    "number": (int, float),
}


def validate(node: SchemaNode, value: Any, old: Any = None) -> list[Cause]:
    """What is wrong with a whole object, at most `MAX_CAUSES` things.

    `old` is the object before this write, None on a create.
    """
    causes: list[Cause] = []
    _Walk(causes).visit(node, value, old, "")
    return causes[:MAX_CAUSES]


def list_item_key(node: SchemaNode, item: Any) -> str | None:
    """What tells an item of a keyed list or a set apart, as text; None in an atomic list."""
    if node.list_type == "map" and isinstance(item, dict) and node.items is not None:
        keys = {}
        for name in sorted(node.list_keys):
            sub = node.items.properties.get(name)
            fallback = sub.default if sub is not None and isinstance(sub.default, str | int) else None
            keys[name] = item.get(name, fallback)
        return orjson.dumps({k: v for k, v in keys.items() if v is not None}).decode()
    if node.list_type == "set":
        return orjson.dumps(item, option=orjson.OPT_SORT_KEYS).decode()
    return None


class _Walk:
    """One pass over an object."""

    def __init__(self, causes: list[Cause]) -> None:
        self._causes = causes

    def visit(self, node: SchemaNode, value: Any, old: Any, path: str) -> None:
        if len(self._causes) >= MAX_CAUSES:
            return
        unchanged = old is not None and value == old
        if not unchanged:
            wrong = _wrong_type(node, value, path)
            if wrong is not None:
                self._causes.append(wrong)
                return
            if node.limited:
                self._causes += limits.check(node.raw, value, path)
            self._composed(node, value, path)
        if isinstance(value, dict):
            self._object(node, value, old, path, unchanged)
        elif isinstance(value, list):
            self._list(node, value, old, path, unchanged)
        for rule in node.raw.get("x-kubernetes-validations") or ():
            if unchanged and not compile_expression(rule["rule"]).transition:
                continue
            cause = check_rule(rule, node, value, old, path)
            if cause is not None:
                self._causes.append(cause)

    def _object(self, node: SchemaNode, value: dict[str, Any], old: Any, path: str, unchanged: bool) -> None:
        if not unchanged:
            missing = [key for key in node.required if key not in value]
            self._causes += [required(f"{path}.{key}" if path else key) for key in missing]
        for key, item in value.items():
            sub = node.child(key)
            if sub is not None:
                was = old.get(key) if isinstance(old, dict) else None
                self.visit(sub, item, was, f"{path}.{key}" if path else key)

    def _list(self, node: SchemaNode, value: list[Any], old: Any, path: str, unchanged: bool) -> None:
        keyed = node.list_type == "map"
        before = {list_item_key(node, item): item for item in old} if keyed and isinstance(old, list) else {}
        seen: set[str] = set()
        for index, item in enumerate(value):
            here = f"{path}[{index}]"
            key = list_item_key(node, item)
            if node.items is not None:
                self.visit(node.items, item, item if unchanged and not keyed else before.get(key), here)
            if key is not None and key in seen and not unchanged:
                self._causes.append(Cause(here, "FieldValueDuplicate", f"Duplicate value: {key}"))
            if key is not None:
                seen.add(key)

    def _composed(self, node: SchemaNode, value: Any, path: str) -> None:
        for keyword in ("allOf", "anyOf", "oneOf"):
            branches = node.raw.get(keyword) or ()
            if not branches or (node.int_or_string and keyword == "anyOf"):
                continue
            good = sum(limits.accepts(branch, value) for branch in branches)
            wanted = {"allOf": good == len(branches), "anyOf": good > 0, "oneOf": good == 1}[keyword]
            if not wanted:
                words = {"allOf": "all the schemas", "anyOf": "at least one schema", "oneOf": "one and only one schema"}
                self._causes.append(invalid_value(path, value, f'"{path}" must validate {words[keyword]} ({keyword})'))
        if "not" in node.raw and limits.accepts(node.raw["not"], value):
            self._causes.append(invalid_value(path, value, f'"{path}" must not validate the schema (not)'))


def _wrong_type(node: SchemaNode, value: Any, path: str) -> Cause | None:
    if node.int_or_string:
        good = isinstance(value, int | str) or (node.quantity and isinstance(value, float))
        wanted = "integer or string"
        good = good and not isinstance(value, bool)
    elif value is None:
        good, wanted = node.nullable or node.type is None, node.type or "object"
    else:
        wanted = node.type or "object"
        good = node.type is None or isinstance(value, _TYPES[node.type])
        if node.type in ("integer", "number"):
            good = good and not isinstance(value, bool)
            good = good and not (node.type == "integer" and isinstance(value, float) and not value.is_integer())
    if good:
        return None
    text = f"{path} in body must be of type {wanted}: {shown(value)}"
    return Cause(path or "<nil>", "FieldValueTypeInvalid", f"Invalid value: {shown(value)}: {text}")
