"""Sets of fields as `managedFields` records them (FieldsV1), and what of an object belongs into them.

A path is a tuple of `f:<name>` for a field, `k:<json of the keys>` for an item of a keyed list and `v:<json>` for a
member of a set, as in structured-merge-diff. Atomic lists and maps are one field whatever they hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from meshwright.local.apiserver.schema.node import FREE, SchemaNode
from meshwright.local.apiserver.schema.validation import list_item_key

Path = tuple[str, ...]

_UNTRACKED_METADATA = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "managedFields",
    "selfLink",
)


def encode(paths: set[Path]) -> dict[str, Any]:
    """FieldsV1 of a set; `.` marks a field that is in the set and has members below it too."""
    root: dict[str, Any] = {}
    for path in sorted(paths):
        node = root
        for part in path:
            node = node.setdefault(part, {})
    _mark(root, paths, ())
    return root


def _mark(node: dict[str, Any], paths: set[Path], path: Path) -> None:
    for part, below in list(node.items()):
        here = (*path, part)
        if below:
            _mark(below, paths, here)
            if here in paths:
                node[part] = {".": {}, **below}


def decode(fields: dict[str, Any], path: Path = ()) -> set[Path]:
    """The set that FieldsV1 says."""
    found: set[Path] = set()
    for part, below in fields.items():
        if part == ".":
            found.add(path)
        elif below:
            found |= decode(below, (*path, part))
        else:
            found.add((*path, part))
    return found


def trackable(obj: dict[str, Any]) -> dict[str, Any]:
    """The object without what never has an owner: its identity and what only the server sets."""
    metadata = {k: v for k, v in (obj.get("metadata") or {}).items() if k not in _UNTRACKED_METADATA}
    rest = {k: v for k, v in obj.items() if k not in ("apiVersion", "kind", "metadata")}
    return {**rest, "metadata": metadata} if metadata else rest


def children(node: SchemaNode, value: Any) -> Iterator[tuple[str, SchemaNode, Any, bool]] | None:
    """The parts of a value that have owners of their own: path element, node, value, and whether the schema names it.

    None for a leaf: a scalar, something atomic, or something empty.
    """
    if isinstance(value, dict) and value and not node.atomic_map:
        return ((f"f:{key}", node.child(key) or FREE, item, key in node.properties) for key, item in value.items())
    if isinstance(value, list) and value and node.list_type in ("map", "set"):
        return _items(node, value)
    return None


def _items(node: SchemaNode, value: list[Any]) -> Iterator[tuple[str, SchemaNode, Any, bool]]:
    letter = "k" if node.list_type == "map" else "v"
    for item in value:
        yield f"{letter}:{list_item_key(node, item)}", node.items or FREE, item, False


def applied(node: SchemaNode, value: Any, path: Path = ()) -> set[Path]:
    """The fields that an applied configuration is about: its leaves, and the items of lists and maps."""
    parts = children(node, value)
    if parts is None:
        return {path} if path else set()
    found: set[Path] = set()
    for part, sub, item, named in parts:
        here = (*path, part)
        if not named and (isinstance(item, dict) or part[0] != "f"):
            found.add(here)
        found |= {here} if part[0] == "v" else applied(sub, item, here)
    return found


@dataclass(slots=True)
class Changes:
    """Which fields differ between two states of an object."""

    added: set[Path] = field(default_factory=set)
    modified: set[Path] = field(default_factory=set)
    removed: set[Path] = field(default_factory=set)


def compare(node: SchemaNode, old: Any, new: Any) -> Changes:
    """The difference of two trackable objects. Equal parts are not walked, so a small change costs little."""
    changes = Changes()
    _compare(node, old, new, (), changes)
    return changes


def _compare(node: SchemaNode, old: Any, new: Any, path: Path, changes: Changes) -> None:
    if old == new:
        return
    before, after = children(node, old), children(node, new)
    if before is None and after is None:
        changes.modified.add(path)
        return
    was = {part: (sub, item) for part, sub, item, _ in before or ()}
    now = {part: (sub, item) for part, sub, item, _ in after or ()}
    if (before is None and not isinstance(old, dict | list)) or (after is None and not isinstance(new, dict | list)):
        changes.modified.add(path)
    for part, (sub, item) in now.items():
        if part not in was:
            changes.added |= _nodes(sub, item, (*path, part))
        elif part[0] != "v":
            _compare(sub, was[part][1], item, (*path, part), changes)
    for part, (sub, item) in was.items():
        if part not in now:
            changes.removed |= _nodes(sub, item, (*path, part))


def _nodes(node: SchemaNode, value: Any, path: Path) -> set[Path]:
    found = {path}
    for part, sub, item, _ in children(node, value) or ():
        found |= {(*path, part)} if part[0] == "v" else _nodes(sub, item, (*path, part))
    return found
