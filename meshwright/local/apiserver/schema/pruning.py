"""Pruning and defaulting: an object made to fit its schema before it is checked."""

from __future__ import annotations

import copy
from typing import Any

from meshwright.local.apiserver.schema.node import MISSING, SchemaNode


def prune(node: SchemaNode, value: Any, path: str = "") -> list[str]:
    """Drop in place what the schema does not name, and nulls where none may be.

    Returns:
        The paths of the unknown fields, as strict field validation reports them.
    """
    dropped: list[str] = []
    if isinstance(value, dict):
        for key in list(value):
            here = f"{path}.{key}" if path else key
            sub = node.child(key)
            if sub is None:
                if node.type is not None or node.properties:
                    dropped.append(here)
                    del value[key]
            elif value[key] is None and not sub.nullable:
                if sub.default is MISSING:
                    del value[key]
            else:
                dropped += prune(sub, value[key], here)
    elif isinstance(value, list) and node.items is not None:
        for index, item in enumerate(value):
            dropped += prune(node.items, item, f"{path}[{index}]")
    return dropped


def apply_defaults(node: SchemaNode, value: Any) -> None:
    """Fill in defaults in place, parents before children; a null that may not be takes the default too."""
    if isinstance(value, dict):
        for key, sub in node.properties.items():
            if sub.default is not MISSING and (key not in value or (value[key] is None and not sub.nullable)):
                value[key] = copy.deepcopy(sub.default)
        for key, item in value.items():
            child = node.child(key)
            if child is not None and isinstance(item, dict | list):
                apply_defaults(child, item)
    elif isinstance(value, list) and node.items is not None:
        for item in value:
            if isinstance(item, dict | list):
                apply_defaults(node.items, item)
