"""How large values of a schema can be, and how many of them one object can hold: what CEL rules' costs depend on.

Sizes are elements of lists and maps and bytes of strings. The bound behind them all is that of a request: a schema
without limits allows what 3 MiB can carry (apiserver/pkg/cel and apiextensions' `schemas.SchemaDeclType`).
"""

from __future__ import annotations

import math
from typing import Any

Schema = dict[str, Any]

_REQUEST_BYTES = 3 * 1024 * 1024
_BRACKETS = 2
_UTF8_BYTES = 4
_FORMAT_BYTES = {"duration": 20, "date": 10, "date-time": 23}
_LEAST_BYTES = {"string": 2, "boolean": 4, "integer": 1, "number": 1}
KEY: Schema = {"type": "string", "maxLength": 0}
"""Keys of maps, and names in metadata: what goes over them counts as if they had no length."""
_METADATA: Schema = {"type": "object", "properties": {"name": KEY, "generateName": KEY}}


def size_of(schema: Schema) -> float:
    """The largest size of a value; 0 for one that has none."""
    kind = schema.get("type")
    if schema.get("x-kubernetes-int-or-string"):
        return _REQUEST_BYTES - _BRACKETS
    if kind == "string":
        if schema.get("format") in _FORMAT_BYTES:
            return _FORMAT_BYTES[schema["format"]]
        if "maxLength" in schema:
            return float(schema["maxLength"] * _UTF8_BYTES)
        longest = max((len(str(choice)) for choice in schema.get("enum") or ()), default=0)
        return longest or _REQUEST_BYTES - _BRACKETS
    if kind == "array":
        fill = (_REQUEST_BYTES - _BRACKETS) // (least_bytes(schema.get("items") or {}) + 1)
        return float(schema.get("maxItems", fill))
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        # A key of at least one letter with quotes, a colon and a comma.
        fill = (_REQUEST_BYTES - _BRACKETS) // (least_bytes(schema["additionalProperties"]) + 6)
        return float(schema.get("maxProperties", fill))
    return 0.0


def least_bytes(schema: Schema) -> int:
    """Bytes that any value takes as JSON."""
    kind = schema.get("type")
    if kind != "object":
        return _LEAST_BYTES.get(str(kind), _BRACKETS)
    properties = schema.get("properties") or {}
    needed = [key for key in schema.get("required") or () if key in properties and "default" not in properties[key]]
    return _BRACKETS + sum(len(key) + 4 + least_bytes(properties[key]) for key in needed)


def child_of(schema: Schema | None, name: str) -> Schema | None:
    """The schema of a field; None when it is not known."""
    if schema is None:
        return None
    if name == "metadata" and "metadata" not in (schema.get("properties") or {}):
        return _METADATA
    if name in (schema.get("properties") or {}):
        found = schema["properties"][name]
        return {**_METADATA, **found} if name == "metadata" else found
    return element_of(schema) if schema.get("type") == "object" else None


def element_of(schema: Schema | None) -> Schema | None:
    """The schema of a list's items or a map's values; None when it is not known."""
    below = (schema or {}).get("items") or (schema or {}).get("additionalProperties")
    return below if isinstance(below, dict) else None


def times_within(schema: Schema, above: float) -> float:
    """How often something inside this schema's lists or maps can be there, when the schema itself is `above` times."""
    if element_of(schema) is None:
        return above
    limit = schema.get("maxItems", schema.get("maxProperties"))
    return above * (math.inf if limit is None else float(limit))


def most_often(schema: Schema, times: float) -> float:
    """How many values of a schema one object holds at most: `times`, or as many as a request carries."""
    return times if times < math.inf else _REQUEST_BYTES // (least_bytes(schema) + 1)
