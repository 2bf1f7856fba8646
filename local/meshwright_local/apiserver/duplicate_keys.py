"""Keys that a body has twice: an error or a warning, by the requested field validation. The last value counts.

A body without such keys, as almost every one is, costs no second parse: it has as many quotation marks as what was
decoded from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson
import yaml


class _Pairs(list[tuple[str, Any]]):
    """An object as its keys and values, in their order."""


@dataclass(slots=True)
class DuplicateKeys:
    """The duplicate keys of one body, in their order; those of YAML by their lines, which are reported together."""

    paths: dict[str, int] = field(default_factory=dict)
    """Path of a key that is there twice -> its position."""
    positions: dict[str, int] = field(default_factory=dict)
    """Path of every key -> position of the first one."""
    lines: list[str] = field(default_factory=list)
    """Texts about duplicate keys in YAML."""
    prefix: str = ""
    in_order: bool = False
    """Whether unknown fields are told between them, by their position: they are found in one pass."""

    def warnings(self, unknown: list[str]) -> list[str]:
        """Return the texts about duplicate and unknown fields."""
        texts = [(position, f'{self.prefix}duplicate field "{path}"') for path, position in self.paths.items()]
        dropped = [(self.positions.get(path, 0), f'unknown field "{path}"') for path in unknown]
        both = [*texts, *dropped]
        if self.in_order:
            both.sort(key=lambda item: item[0])
        return [*self.lines, *(text for _, text in both)]

    def errors(self, unknown: list[str]) -> list[str]:
        """Return the parts of a strict decoding error."""
        texts = self.warnings(unknown)[len(self.lines) :]
        return [yaml_error(self.lines), *texts] if self.lines else texts


def yaml_error(lines: list[str]) -> str:
    """Return the error of a YAML document with duplicate keys."""
    return "\n  ".join(["yaml: unmarshal errors:", *lines])


def in_json(raw: bytes, value: Any, *, typed: bool) -> tuple[Any, DuplicateKeys]:
    """Return the duplicate keys of a JSON text, and its value, which is `value` if there are none.

    In a `typed` one, an object of a built-in kind, objects with the same key are merged: a real server reads both into
    the same structure.
    """
    found = DuplicateKeys(in_order=typed)
    try:
        marks = orjson.dumps(value).count(b'"')
    except TypeError as error:
        raise RecursionError("nested too deeply") from error
    if raw.count(b'"') == marks and b"\\u0022" not in raw:
        return value, found
    pairs = json.loads(raw, object_pairs_hook=_Pairs)
    return _built(pairs, "", found, merge=typed), found


def _built(node: Any, path: str, found: DuplicateKeys, *, merge: bool) -> Any:
    if isinstance(node, _Pairs):
        out: dict[str, Any] = {}
        for key, item in node:
            where, position = f"{path}.{key}" if path else key, len(found.positions) + len(found.paths)
            if key in out:
                found.paths.setdefault(where, position)
            found.positions.setdefault(where, position)
            new, old = _built(item, where, found, merge=merge), out.get(key)
            out[key] = {**old, **new} if merge and isinstance(old, dict) and isinstance(new, dict) else new
        return out
    if isinstance(node, list):
        return [_built(item, f"{path}[{index}]", found, merge=merge) for index, item in enumerate(node)]
    return node


def in_yaml(raw: bytes, loader: type[yaml.CSafeLoader]) -> DuplicateKeys:
    """Return the duplicate keys of a YAML document."""
    root = yaml.compose(raw, Loader=loader)
    return DuplicateKeys(lines=list(_lines(root)))


def _lines(node: yaml.Node | None) -> Iterator[str]:
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            yield from _lines(value)
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in seen:
                said = json.dumps(key.value) if key.tag.endswith(":str") else _plain(key)
                yield f"line {value.start_mark.line + 1}: key {said} already set in map"
            seen.add((key.tag, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _lines(item)


def _plain(key: yaml.ScalarNode) -> str:
    """Return a key that is no text, as Go prints its value."""
    if key.tag.endswith(":bool"):
        return "true" if key.value.lower() in ("y", "yes", "true", "on") else "false"
    return str(key.value)
