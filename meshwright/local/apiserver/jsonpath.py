"""The part of JSONPath that printer columns use: fields, quoted fields, indices, `[*]` and equality filters."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

_STEP = re.compile(
    r"""\[\?\(\s*@\.(?P<field>[\w.]+)\s*==\s*(?P<quote>['"])(?P<value>.*?)(?P=quote)\s*\)\]"""
    r"""|\[['"](?P<quoted>[^'"]+)['"]\]|\[(?P<index>-?\d+)\]|\[(?P<all>\*)\]"""
    r"""|\.?(?P<name>(?:[^.\[\]\\]|\\.)+)"""
)


@lru_cache(maxsize=1024)
def _steps(path: str) -> tuple[re.Match[str], ...]:
    return tuple(_STEP.finditer(path.strip("{}")))


def first(obj: Any, path: str) -> Any:
    """The first value under a path such as `.status.conditions[?(@.type=="Ready")].status`; None when none is."""
    values = [obj]
    for step in _steps(path):
        values = [found for value in values for found in _follow(value, step)]
    return values[0] if values else None


def _follow(value: Any, step: re.Match[str]) -> list[Any]:
    if step["field"] is not None:
        keys = step["field"].split(".")
        return [item for item in value if _deep(item, keys) == step["value"]] if isinstance(value, list) else []
    if step["all"] is not None:
        return list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list) else []
    if step["index"] is not None:
        index = int(step["index"])
        return [value[index]] if isinstance(value, list) and -len(value) <= index < len(value) else []
    name = step["quoted"] or re.sub(r"\\(.)", r"\1", step["name"])
    return [value[name]] if isinstance(value, dict) and name in value else []


def _deep(value: Any, keys: list[str]) -> str | None:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return None if value is None else str(value)
