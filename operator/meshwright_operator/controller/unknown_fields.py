"""Keeps what a later version wrote to status, so that a rollback of the operator and the next upgrade lose nothing.

A version deletes only what it could read. It ignores fields that it does not know, and values that it cannot read, such
as the name of a later schedule. Their meaning depends on the object around them: once a plan, a mesh generation or a
pod is replaced, its unknown fields are removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from meshwright.api.objects import KubeObject
from meshwright.api.status import (
    CheckpointStatus,
    EvaluationStatus,
    MeshStatus,
    PlanStatus,
    WorkerPlacement,
)

IDENTITY: Mapping[type[BaseModel], str] = {
    PlanStatus: "revision",
    MeshStatus: "generation",
    CheckpointStatus: "step",
    EvaluationStatus: "step",
    WorkerPlacement: "pod",
}
"""The field of an object that changes when the object is replaced."""


@dataclass(frozen=True, slots=True)
class _Member:
    """A field that contains an object, or a list of objects with a key."""

    model: type[BaseModel]
    key: str


def with_unknown_fields(old: KubeObject, readable: KubeObject, new: KubeObject, model: type[BaseModel]) -> KubeObject:
    """`new` with the fields of `old` that this version does not know or could not read.

    Args:
        old: The stored object.
        readable: What this version could read of it.
        new: What this version writes.
        model: The class of all three.
    """
    identity = IDENTITY.get(model)
    if identity is not None and old.get(identity) != new.get(identity):
        return new
    kept = {key: value for key, value in old.items() if key not in new and key not in readable}
    for name, member in _members(model).items():
        before, read, after = old.get(name), readable.get(name), new.get(name)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            kept[name] = with_unknown_fields(before, read if isinstance(read, dict) else {}, after, member.model)
        elif member.key and isinstance(before, list) and isinstance(after, list):
            kept[name] = _items_with_unknown_fields(before, read, after, member)
    return {**new, **kept} if kept else new


def _items_with_unknown_fields(before: list[Any], read: Any, after: list[Any], member: _Member) -> list[Any]:
    old, readable = _by_key(before, member.key), _by_key(read, member.key)
    return [
        with_unknown_fields(old[key], readable.get(key, {}), item, member.model)
        if isinstance(item, dict) and (key := item.get(member.key)) in old
        else item
        for item in after
    ]


def _by_key(items: Any, key: str) -> dict[Any, KubeObject]:
    return {item[key]: item for item in items if isinstance(item, dict) and key in item} if items else {}


@cache
def _members(model: type[BaseModel]) -> dict[str, _Member]:
    """The fields of a class that contain objects, by their names in JSON."""
    members = {}
    for name, info in model.model_fields.items():
        extra = info.json_schema_extra
        key = str(extra.get("x-list-map-key", "")) if isinstance(extra, dict) else ""
        if (inner := _model_in(info.annotation)) is not None:
            members[info.alias or name] = _Member(inner, key)
    return members


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return annotation if issubclass(annotation, BaseModel) else None
    return next((found for part in get_args(annotation) if (found := _model_in(part)) is not None), None)
