"""`managedFields`: who owns which field, after a plain write and after an apply."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from meshwright.local.apiserver.apply.fieldset import Path, compare, decode, encode, trackable
from meshwright.local.apiserver.schema.node import SchemaNode

MAX_UPDATE_MANAGERS = 10
ANCIENT = "ancient-changes"


@dataclass(slots=True)
class Manager:
    """One entry of `managedFields`."""

    name: str
    operation: str
    subresource: str
    api_version: str
    time: str
    fields: set[Path]

    def is_of(self, writer: Writer, operation: str) -> bool:
        """Whether this entry is the one that this writer's operation updates."""
        return (self.name, self.operation, self.subresource) == (writer.name, operation, writer.subresource)

    def wire(self) -> dict[str, Any]:
        """The form it has in an object."""
        entry: dict[str, Any] = {
            "manager": self.name,
            "operation": self.operation,
            "apiVersion": self.api_version,
            "time": self.time,
            "fieldsType": "FieldsV1",
            "fieldsV1": encode(self.fields),
        }
        return {**entry, "subresource": self.subresource} if self.subresource else entry


@dataclass(frozen=True, slots=True)
class Writer:
    """Who writes, through which subresource, in which version of the API, when."""

    name: str
    subresource: str
    api_version: str
    time: str


def managers_of(obj: dict[str, Any] | None) -> list[Manager]:
    """The entries of an object; those that make no sense are left out."""
    entries = ((obj or {}).get("metadata") or {}).get("managedFields") or ()
    return [
        Manager(
            e.get("manager", ""),
            e["operation"],
            e.get("subresource", ""),
            e.get("apiVersion", ""),
            e.get("time") or "",
            decode(e["fieldsV1"]),
        )
        for e in entries
        if e.get("operation") in ("Apply", "Update") and isinstance(e.get("fieldsV1"), dict)
    ]


def store_managers(obj: dict[str, Any], managers: Iterable[Manager]) -> None:
    """Write the entries into an object, those that own nothing left out; Apply before Update, older before newer."""
    kept = sorted((m for m in managers if m.fields), key=lambda m: (m.operation, m.time, m.name))
    updates = [m for m in kept if m.operation == "Update" and not m.subresource]
    surplus = updates[: max(0, len(updates) - MAX_UPDATE_MANAGERS)]
    if surplus:
        merged = Manager(ANCIENT, "Update", "", surplus[-1].api_version, surplus[-1].time, set())
        for manager in surplus:
            merged.fields |= manager.fields
        kept = [merged if m is surplus[-1] else m for m in kept if m not in surplus[:-1]]
    if kept:
        obj["metadata"]["managedFields"] = [m.wire() for m in kept]
    else:
        obj["metadata"].pop("managedFields", None)


def track_update(
    node: SchemaNode, old: dict[str, Any] | None, new: dict[str, Any], writer: Writer, custom: bool
) -> None:
    """After a plain write: what it changed is the writer's alone, what it removed is nobody's.

    `custom` says that the object is a custom resource: built-in types are structs whose `spec` and `status` always
    exist and so are never added.
    """
    changes = compare(node, trackable(old or {}), trackable(new))
    touched = changes.added | changes.modified
    touched -= {("f:metadata",)} if custom else {("f:metadata",), ("f:spec",), ("f:status",)}
    managers = [] if _reset(new) else managers_of(old)
    mine = next((m for m in managers if m.is_of(writer, "Update")), None)
    if mine is None:
        mine = Manager(writer.name, "Update", writer.subresource, writer.api_version, writer.time, set())
        managers.append(mine)
    for manager in managers:
        before = set(manager.fields)
        manager.fields -= changes.removed
        manager.fields = manager.fields | touched if manager is mine else manager.fields - touched
        if manager is mine and manager.fields != before:
            manager.time, manager.api_version = writer.time, writer.api_version
    store_managers(new, managers)


def _reset(new: dict[str, Any]) -> bool:
    """Whether a write asks to forget all owners, by an empty list or a list with one empty entry."""
    return new["metadata"].get("managedFields") in ([], [{}])
