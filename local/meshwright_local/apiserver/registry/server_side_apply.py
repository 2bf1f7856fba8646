"""Server-side apply: field sets, managers, merging, conflicts and `metadata.managedFields`.

A *field manager* is a client (`fieldManager`) with an *operation* (Apply, or Update for every other write) and a
subresource. `managedFields` has one entry for each, with its *field set* (FieldsV1): the fields that it owns.

* A plain write becomes the only owner of the fields it changed; fields it removed lose all owners (`track_update`).
* An apply (`server_side_apply`) merges the configuration into the live object. Lists of type `map` or `set` are merged
  item by item, atomic lists are replaced. A *conflict* is a field that the merge changes and that another manager owns:
  an error or, with `force`, a change of owner. A field that this manager applied last time and no longer applies is
  removed with all in it, unless it has an owner, or is a field of the schema with an owned field below it. If two
  managers apply an equal value, both own it.

In a field set a path is a tuple of `f:<name>` for a field, `k:<json of the keys>` for an item of a keyed list and
`v:<json>` for a member of a set, as in structured-merge-diff.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver.schema.structural import FREE, SchemaNode
from meshwright_local.apiserver.schema.validation import list_item_key
from meshwright_local.apiserver.status_errors import ApiError, Cause, bad_request, details_of

Path = tuple[str, ...]
Part = tuple[str, SchemaNode, Any, bool]
"""Path element, node, value, and whether it is in the schema."""

MAX_UPDATE_MANAGERS = 10
_ENTRY_KEYS = ("manager", "operation", "subresource", "apiVersion", "time")
_SERVER_SET = {"name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "managedFields"}


class Writer(NamedTuple):
    """The manager of a write, its subresource ("" for the object itself), API version and time."""

    name: str
    subresource: str
    api_version: str
    time: str


@dataclass(slots=True)
class Manager:
    """One entry of `managedFields`."""

    name: str
    operation: str
    subresource: str
    api_version: str
    time: str
    fields: set[Path] = field(default_factory=set)

    def wire(self) -> KubeObject:
        """Return its form in an object."""
        entry = {"manager": self.name, "operation": self.operation, "apiVersion": self.api_version, "time": self.time}
        entry |= {"subresource": self.subresource} if self.subresource else {}
        return {**entry, "fieldsType": "FieldsV1", "fieldsV1": encode(self.fields)}


def encode(paths: Iterable[Path]) -> KubeObject:
    """Return FieldsV1 of a field set; `.` marks a field that is in the set and also has members below it."""
    root: KubeObject = {}
    ordered = sorted(paths)
    for path, following in zip(ordered, [*ordered[1:], ()], strict=True):
        node = root
        for part in path:
            node = node.setdefault(part, {})
        if following[: len(path)] == path:  # the first below comes right after in this order
            node["."] = {}
    return root


def decode(fields: KubeObject, path: Path = ()) -> set[Path]:
    """Return the field set of FieldsV1."""
    found: set[Path] = set()
    for part, below in fields.items():
        current_path = path if part == "." else (*path, part)
        found |= decode(below, current_path) if below else {current_path}
    return found


def _managers_of(obj: KubeObject | None) -> list[Manager]:
    """Return the entries of an object, without malformed ones."""
    entries = ((obj or {}).get("metadata") or {}).get("managedFields") or ()
    good = (e for e in entries if e.get("operation") in ("Apply", "Update") and isinstance(e.get("fieldsV1"), dict))
    found = []
    for entry in good:
        manager, operation, subresource, version, time = (entry.get(key) or "" for key in _ENTRY_KEYS)
        found.append(Manager(manager, operation, subresource, version, time, decode(entry["fieldsV1"])))
    return found


def _manager_entry(managers: list[Manager], writer: Writer, operation: str) -> Manager:
    """Return the writer's entry in `managers`. Add it if there is none."""
    who = (writer.name, operation, writer.subresource)
    own_entry = next((m for m in managers if (m.name, m.operation, m.subresource) == who), None)
    if own_entry is None:
        own_entry = Manager(*who, writer.api_version, writer.time)
        managers.append(own_entry)
    return own_entry


def _store_managers(obj: KubeObject, managers: Iterable[Manager]) -> None:
    """Write the entries into an object, without empty ones. Beyond a limit, merge the oldest updates into one."""
    remaining = sorted((m for m in managers if m.fields), key=lambda m: (m.operation, m.time, m.name))
    updates = [m for m in remaining if m.operation == "Update" and not m.subresource]
    surplus = updates[: max(0, len(updates) - MAX_UPDATE_MANAGERS)]
    if surplus:
        last = surplus[-1]
        last.name, last.fields = "ancient-changes", set().union(*(m.fields for m in surplus))
        remaining = [m for m in remaining if m not in surplus[:-1]]
    obj["metadata"].pop("managedFields", None)
    if remaining:
        obj["metadata"]["managedFields"] = [m.wire() for m in remaining]


def track_update(node: SchemaNode, old: KubeObject | None, new: KubeObject, writer: Writer, *, custom: bool) -> None:
    """Update `managedFields` of `new` after a plain write.

    Objects of built-in kinds are structs whose `spec` and `status` always exist and so are never added: not `custom`.
    An empty list of entries, or one empty entry, removes all owners. For the next apply, `before-first-apply` owns
    everything.
    """
    changed, removed = compare(node, _owned_parts(old or {}), _owned_parts(new))
    changed -= _unowned(custom=custom)
    managers = _managers_of(old)
    if old is not None and (not managers or new["metadata"].get("managedFields") in ([], [{}])):
        # Without entries, nothing is tracked until somebody applies the object.
        new["metadata"].pop("managedFields", None)
        return
    own_entry = _manager_entry(managers, writer, "Update")
    before = set(own_entry.fields)
    for manager in managers:
        manager.fields -= removed
        manager.fields = manager.fields | changed if manager is own_entry else manager.fields - changed
    if own_entry.fields != before:
        own_entry.time, own_entry.api_version = writer.time, writer.api_version
    _store_managers(new, managers)


def _unowned(*, custom: bool) -> set[Path]:
    return {("f:metadata",)} if custom else {("f:metadata",), ("f:spec",), ("f:status",)}


def server_side_apply(
    node: SchemaNode, live: KubeObject | None, config: KubeObject, writer: Writer, *, force: bool, custom: bool
) -> KubeObject:
    """Return the object after `writer` applied `config` to `live` (None: a new object), with new `managedFields`.

    Raises:
        ApiError: 409, with one cause for each field that another manager owns, unless `force`.
    """
    _check_keys(node, config, "")
    managers = _managers_of(live)
    if live is not None and not managers:
        everything = compare(node, {}, _owned_parts(live))[0] - _unowned(custom=custom)
        managers = [Manager("before-first-apply", "Update", "", writer.api_version, writer.time, everything)]
    own_entry = _manager_entry(managers, writer, "Apply")
    others = [m for m in managers if m is not own_entry]
    applied_fields = _applied_fields(node, _owned_parts(config))
    merged: KubeObject = merge(node, live, config) if live is not None else copy.deepcopy(config)
    changed, _ = compare(node, _owned_parts(live or {}), _owned_parts(merged))
    conflicts = [(m, path) for m in others for path in sorted(m.fields & changed)]
    if conflicts and not force:
        raise _conflict(conflicts)
    for manager in others:
        manager.fields -= changed
    fields = applied_fields.union({("f:metadata",)}, *(m.fields for m in others))
    owned = fields.union(*(_fields_above(node, path) for path in fields))
    lost = own_entry.fields - applied_fields
    lost |= {above for path in lost for above in _fields_above(node, path)}
    for path in sorted(lost, key=lambda path: (len(path), path)):
        if path not in owned and not _identifies(path):
            _remove(node, merged, path, owned, ())
            for manager in others:
                manager.fields = {other for other in manager.fields if other[: len(path)] != path}
    if own_entry.fields != applied_fields:
        own_entry.time = writer.time
    own_entry.fields, own_entry.api_version = applied_fields, writer.api_version
    merged.setdefault("metadata", {})
    _store_managers(merged, managers)
    return merged


def _check_keys(node: SchemaNode, value: Any, path: str) -> None:
    """Reject lists whose items cannot be told apart.

    Raises:
        ApiError: 400, for an item with the key of another one.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            _check_keys(node.child(key) or FREE, item, f"{path}.{key}")
    elif isinstance(value, list) and node.items is not None:
        seen = set()
        for index, item in enumerate(value):
            key = list_item_key(node, item)
            if key is not None and key in seen:
                text = f"duplicate entries for key {_item_name(key)}"
                raise bad_request(f"failed to create typed patch object: {path}: {text}")
            seen.add(key)
            _check_keys(node.items, item, f"{path}[{index}]")


def _item_name(key: str) -> str:
    """Return how messages name an item of a list: `[name="a"]`, or `[="a"]` in a set."""
    parsed = orjson.loads(key)
    keys = parsed if isinstance(parsed, dict) else {"": parsed}
    return "[" + ",".join(f"{name}={orjson.dumps(value).decode()}" for name, value in keys.items()) + "]"


def merge(node: SchemaNode, live: Any, config: Any) -> Any:
    """Merge `config` into `live`, part by part if parts have separate owners. Shares no data with either."""
    if isinstance(config, dict) and isinstance(live, dict) and not node.atomic_map:
        out = {key: copy.deepcopy(item) for key, item in live.items() if key not in config}
        return out | {key: merge(node.child(key) or FREE, live.get(key), item) for key, item in config.items()}
    if isinstance(config, list) and isinstance(live, list) and node.list_type in ("map", "set"):
        has, wanted = ({list_item_key(node, item): item for item in items} for items in (live, config))
        return [
            merge(node.items or FREE, has[key], wanted[key])
            if key in has and key in wanted and node.list_type == "map"
            else copy.deepcopy(wanted[key] if key in wanted else has[key])
            for key in _merged_order(list(has), list(wanted))
        ]
    return copy.deepcopy(config)


def _merged_order(live: list[str | None], applied: list[str | None]) -> list[str | None]:
    """Return the keys of a merged list: those that are applied in their order, others where they are in the live list.

    A key that is only in the live list comes before the first applied one that follows it there.
    """
    out: list[str | None] = []
    shared, at = [key for key in applied if key in live], 0
    for key in applied:
        while at < len(live) and live[at] != key:
            if live[at] not in applied:
                out.append(live[at])
            elif shared[:1] == [live[at]]:
                break  # the next of both: a new key comes before it
            at += 1
        out.append(key)
        at += at < len(live) and live[at] == key
        shared = shared[shared[:1] == [key] :]
    return out + [key for key in live[at:] if key not in applied]


def compare(node: SchemaNode, old: Any, new: Any, path: Path = ()) -> tuple[set[Path], set[Path]]:
    """Return the fields that were added or modified, and those that were removed. Skips equal parts."""
    if old == new:
        return set(), set()
    before, after = _parts(node, old), _parts(node, new)
    if before is None and after is None:
        return {path}, set()
    was, now = {p[0]: p for p in before or ()}, {p[0]: p for p in after or ()}
    replaced = any(parts is None and not isinstance(v, dict | list) for parts, v in ((before, old), (after, new)))
    changed: set[Path] = {path} if replaced else set()
    removed: set[Path] = set()
    for part, sub, item, _ in now.values():
        if part not in was:
            changed |= _nodes(sub, item, (*path, part))
        elif part[0] != "v":
            more = compare(sub, was[part][2], item, (*path, part))
            changed, removed = changed | more[0], removed | more[1]
    for part, sub, item, _ in was.values():
        if part not in now:
            removed |= _nodes(sub, item, (*path, part))
    return changed, removed


def _owned_parts(obj: KubeObject) -> KubeObject:
    """Return the object without fields that never have an owner: its identity, and fields that the server sets."""
    metadata = {k: v for k, v in (obj.get("metadata") or {}).items() if k not in _SERVER_SET}
    rest = {k: v for k, v in obj.items() if k not in ("apiVersion", "kind", "metadata")}
    return {**rest, "metadata": metadata} if metadata else rest


def _parts(node: SchemaNode, value: Any) -> Iterator[Part] | None:
    """Return the parts of a value that have separate owners; None for a leaf: scalar, atomic or empty."""
    if isinstance(value, dict) and value and not node.atomic_map:
        return ((f"f:{key}", node.child(key) or FREE, item, key in node.properties) for key, item in value.items())
    if isinstance(value, list) and value and node.list_type in ("map", "set"):
        letter = node.list_type.replace("map", "k").replace("set", "v")
        return ((f"{letter}:{list_item_key(node, item)}", node.items or FREE, item, False) for item in value)
    return None


def _applied_fields(node: SchemaNode, value: Any, path: Path = ()) -> set[Path]:
    """Return the fields of an applied configuration: its leaves, and the items of lists and maps."""
    parts = _parts(node, value)
    if parts is None:
        items_have_owners = value == [] and node.list_type in ("map", "set")
        return {path} if path and not items_have_owners else set()
    found: set[Path] = set()
    for part, sub, item, named in parts:
        current_path = (*path, part)
        if not named and (isinstance(item, dict) or part[0] != "f"):
            found.add(current_path)
        found |= {current_path} if part[0] == "v" else _applied_fields(sub, item, current_path)
    return found


def _nodes(node: SchemaNode, value: Any, path: Path) -> set[Path]:
    """Return a field and all fields below it."""
    below = (_nodes(sub, item, (*path, part)) for part, sub, item, _ in _parts(node, value) or ())
    return {path}.union(*below) if path[-1][0] != "v" else {path}


def _fields_above(node: SchemaNode, path: Path) -> Iterator[Path]:
    """Return the fields of the schema in which a field is.

    Who applies a field also has those above it, and removes them with everything in them, also defaults that nobody
    owns, if no other field in them has an owner.
    """
    for depth, part in enumerate(path[:-1], start=1):
        if part.startswith("f:"):
            if part[2:] in node.properties:
                yield path[:depth]
            node = node.child(part[2:]) or FREE
        else:
            node = node.items or FREE


def _identifies(path: Path) -> bool:
    """Return whether a field is part of its list item's key: it is removed only with the item."""
    return len(path) > 1 and path[-2].startswith("k:") and path[-1][2:] in orjson.loads(path[-2][2:])


def _remove(node: SchemaNode, value: Any, path: Path, owned: set[Path], above: Path) -> None:
    """Remove one field in place, and maps and lists that become empty and have no owner."""
    current_path, rest = (*above, path[0]), path[1:]
    found = next((part for part in list(_parts(node, value) or ()) if part[0] == path[0]), None)
    if found is None:
        return
    if rest:
        _remove(found[1], found[2], rest, owned, current_path)
    if not rest or (found[2] in ({}, []) and current_path not in owned):
        if isinstance(value, dict):
            del value[path[0][2:]]
        else:
            value[:] = [item for item in value if item is not found[2]]


def _conflict(conflicts: list[tuple[Manager, Path]]) -> ApiError:
    causes = []
    for manager, path in conflicts:
        text = f'conflict with "{manager.name}"'
        text += f' with subresource "{manager.subresource}"' if manager.subresource else ""
        text += f" using {manager.api_version}" if manager.operation == "Update" else ""
        name = "".join(f".{p[2:]}" if p.startswith("f:") else _item_name(p[2:]) for p in path)
        causes.append(Cause(name, "FieldManagerConflict", text))
    by_manager: dict[str, list[str]] = {}
    for cause in causes:
        by_manager.setdefault(cause.message, []).append(cause.field)
    if len(causes) == 1:
        text = f"{causes[0].message}: {causes[0].field}"
    else:
        text = "\n".join(
            "\n- ".join([f"{who.replace('conflict', 'conflicts', 1)}:", *fields])
            for who, fields in sorted(by_manager.items())
        )
    text = f"Apply failed with {len(causes)} conflict{'s' if len(causes) > 1 else ''}: {text}"
    return ApiError(409, "Conflict", text, details_of("", "", "", causes))
