"""Limits that a schema sets on one value, in the words of the real server, and value-only schemas (`anyOf`, `not`)."""

from __future__ import annotations

import re
from typing import Any

from meshwright.local.apiserver.errors import Cause, invalid_value, shown
from meshwright.local.apiserver.schema.formats import compile_pattern, fits_format


def check(raw: dict[str, Any], value: Any, path: str) -> list[Cause]:
    """What a value breaks of enum, length, size, pattern, format and range."""
    causes: list[Cause] = []
    if "enum" in raw and value not in raw["enum"] and not (value is None and raw.get("nullable")):
        supported = ", ".join(shown(choice) for choice in raw["enum"])
        text = f"Unsupported value: {shown(value)}: supported values: {supported}"
        causes.append(Cause(path, "FieldValueNotSupported", text))
    if isinstance(value, str):
        causes += _text(raw, value, path)
    elif isinstance(value, list):
        causes += _size(raw, value, path, "Items", "items")
        if raw.get("uniqueItems") and any(item in value[:i] for i, item in enumerate(value)):
            causes.append(invalid_value(path, value, f"{path} in body shouldn't contain duplicates"))
    elif isinstance(value, dict):
        causes += _size(raw, value, path, "Properties", "properties")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        causes += _range(raw, value, path)
    return causes


def _text(raw: dict[str, Any], value: str, path: str) -> list[Cause]:
    causes = []
    if len(value) > raw.get("maxLength", len(value)):
        text = f"Too long: may not be more than {raw['maxLength']} bytes"
        causes.append(Cause(path, "FieldValueTooLong", text))
    if len(value) < raw.get("minLength", 0):
        causes.append(invalid_value(path, value, f"{path} in body should be at least {raw['minLength']} chars long"))
    if "pattern" in raw and not _matches(raw["pattern"], value):
        causes.append(invalid_value(path, value, f"{path} in body should match '{raw['pattern']}'"))
    if "format" in raw and not fits_format(raw["format"], value):
        causes.append(invalid_value(path, value, f"{path} in body must be of type {raw['format']}: {shown(value)}"))
    return causes


def _matches(pattern: str, value: str) -> bool:
    try:
        return compile_pattern(pattern).search(value) is not None
    except re.error:
        return True


def _size(raw: dict[str, Any], value: list[Any] | dict[str, Any], path: str, key: str, word: str) -> list[Cause]:
    causes, size = [], len(value)
    most, least = raw.get(f"max{key}"), raw.get(f"min{key}", 0)
    if most is not None and size > most:
        causes.append(Cause(path, "FieldValueTooMany", f"Too many: {size}: must have at most {most} items"))
    if size < least:
        causes.append(invalid_value(path, size, f"{path} in body should have at least {least} {word}"))
    return causes


def _range(raw: dict[str, Any], value: float, path: str) -> list[Cause]:
    causes = []
    low, high, step = raw.get("minimum"), raw.get("maximum"), raw.get("multipleOf")
    if low is not None and (value < low or (raw.get("exclusiveMinimum") is True and value == low)):
        words = "greater than" if raw.get("exclusiveMinimum") is True else "greater than or equal to"
        causes.append(invalid_value(path, value, f"{path} in body should be {words} {low}"))
    if high is not None and (value > high or (raw.get("exclusiveMaximum") is True and value == high)):
        words = "less than" if raw.get("exclusiveMaximum") is True else "less than or equal to"
        causes.append(invalid_value(path, value, f"{path} in body should be {words} {high}"))
    if step and abs(value / step - round(value / step)) > 1e-9:
        causes.append(invalid_value(path, value, f"{path} in body should be a multiple of {step}"))
    bits = {"int32": 31, "int64": 63}.get(raw.get("format", ""))
    if bits and not -(1 << bits) <= value < 1 << bits:
        causes.append(invalid_value(path, value, f"{path} in body must be of type {raw['format']}"))
    return causes


def accepts(raw: dict[str, Any], value: Any) -> bool:
    """Whether a value-only schema (inside allOf, anyOf, oneOf, not) accepts a value."""
    if check(raw, value, ""):
        return False
    if not _accepts_kind(raw.get("type"), value):
        return False
    if isinstance(value, dict):
        if any(key not in value for key in raw.get("required") or ()):
            return False
        properties = raw.get("properties") or {}
        if not all(accepts(sub, value[key]) for key, sub in properties.items() if key in value):
            return False
    items = raw.get("items")
    if isinstance(value, list) and isinstance(items, dict) and not all(accepts(items, item) for item in value):
        return False
    branches = {key: [accepts(b, value) for b in raw[key]] for key in ("allOf", "anyOf", "oneOf") if raw.get(key)}
    return (
        all(branches.get("allOf", [True]))
        and any(branches.get("anyOf", [True]))
        and sum(branches.get("oneOf", [True])) == 1
        and not ("not" in raw and accepts(raw["not"], value))
    )


def _accepts_kind(kind: str | None, value: Any) -> bool:
    if kind is None:
        return True
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    known: dict[str, type | tuple[type, ...]] = {
        "object": dict,
        "array": list,
        "string": str,
        "number": (int, float),
    }
    return kind in known and isinstance(value, known[kind])
