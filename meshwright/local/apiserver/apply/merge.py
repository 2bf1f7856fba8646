"""Server-side apply: a configuration merged into the live object, with conflicts found and dropped fields removed.

Follows structured-merge-diff: a conflict is a field that the merge would change while another manager owns it; a field
that the manager applied last time and not now is removed unless someone else owns it or something below it.
"""

from __future__ import annotations

import copy
from typing import Any

import orjson

from meshwright.local.apiserver.apply.fieldset import Path, applied, children, compare, trackable
from meshwright.local.apiserver.apply.managers import Manager, Writer, managers_of, store_managers
from meshwright.local.apiserver.schema.node import FREE, SchemaNode
from meshwright.local.apiserver.schema.validation import list_item_key


class ApplyConflict(Exception):
    """Other managers own fields that the configuration would change."""

    def __init__(self, conflicts: list[tuple[Manager, Path]]) -> None:
        super().__init__(f"{len(conflicts)} conflicts")
        self.conflicts = conflicts


def server_side_apply(
    node: SchemaNode,
    live: dict[str, Any] | None,
    config: dict[str, Any],
    writer: Writer,
    *,
    force: bool,
) -> dict[str, Any]:
    """The object after `writer` applied `config`, with its `managedFields` brought up to date.

    Raises:
        ApplyConflict: another manager owns what would change, and `force` is false.
    """
    managers = managers_of(live)
    mine = next((m for m in managers if m.is_of(writer, "Apply")), None)
    wanted = applied(node, trackable(config))
    merged = merge(node, live, config) if live is not None else copy.deepcopy(config)
    changes = compare(node, trackable(live or {}), trackable(merged))
    changed = changes.modified | changes.added
    others = [m for m in managers if m is not mine]
    conflicts = [(m, p) for m in others for p in sorted(m.fields & changed)]
    if conflicts and not force:
        raise ApplyConflict(conflicts)
    for manager in others:
        manager.fields -= changed
    if mine is not None:
        _drop_unapplied(node, merged, mine.fields - wanted, others)
    if mine is None:
        mine = Manager(writer.name, "Apply", writer.subresource, writer.api_version, writer.time, set())
    if mine.fields != wanted:
        mine.time = writer.time
    mine.fields, mine.api_version = wanted, writer.api_version
    merged.setdefault("metadata", {})
    store_managers(merged, [mine, *others])
    return merged


def merge(node: SchemaNode, live: Any, config: Any) -> Any:
    """`config` laid over `live`, part by part where parts have owners of their own. Shares nothing with either."""
    if isinstance(config, dict) and isinstance(live, dict) and not node.atomic_map:
        out = {key: copy.deepcopy(item) for key, item in live.items() if key not in config}
        for key, item in config.items():
            out[key] = merge(node.child(key) or FREE, live.get(key), item)
        return out
    if isinstance(config, list) and isinstance(live, list) and node.list_type in ("map", "set"):
        position = {list_item_key(node, item): index for index, item in enumerate(live)}
        items = copy.deepcopy(live)
        for item in config:
            key = list_item_key(node, item)
            if key not in position:
                items.append(copy.deepcopy(item))
            elif node.keyed_list:
                items[position[key]] = merge(node.items or FREE, items[position[key]], item)
        return items
    return copy.deepcopy(config)


def _drop_unapplied(node: SchemaNode, merged: dict[str, Any], gone: set[Path], others: list[Manager]) -> None:
    owned = {path[:depth] for m in others for path in m.fields for depth in range(1, len(path) + 1)}
    for path in sorted(gone, key=lambda path: (len(path), path)):
        if path not in owned and not _identifies(path):
            _remove(node, merged, path, owned, ())


def _identifies(path: Path) -> bool:
    """Whether a field is part of its list item's key: it goes with the item and never before it."""
    return len(path) > 1 and path[-2].startswith("k:") and path[-1][2:] in orjson.loads(path[-2][2:])


def _remove(node: SchemaNode, value: Any, path: Path, owned: set[Path], above: Path) -> None:
    """Remove one field in place, and the maps and lists that this leaves empty and unowned."""
    head, rest = path[0], path[1:]
    for part, sub, item, _ in list(children(node, value) or ()):
        if part != head:
            continue
        here = (*above, head)
        if rest:
            _remove(sub, item, rest, owned, here)
        if not rest or (item in ({}, []) and here not in owned):
            if isinstance(value, dict):
                del value[head[2:]]
            else:
                value[:] = [x for x in value if x is not item]
        return
