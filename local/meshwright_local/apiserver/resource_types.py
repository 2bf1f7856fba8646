"""A resource: group, version, plural name and schema, and the hooks of its kind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver.schema.structural import SchemaNode
from meshwright_local.apiserver.status_errors import ApiError, Cause, on_object
from meshwright_local.apiserver.store import ResourceKey, Store


class Rules:
    """Hooks of a kind. By default they do nothing; kinds with special behavior override some of them."""

    name_form = "subdomain"
    graceful = False
    """Whether deletion is graceful: it waits until an agent has stopped something."""
    put_creates = False
    """Whether a PUT of an object that does not exist creates it."""
    returns_deleted = False
    """Whether a delete returns the object instead of a Status."""

    def defaults(self, obj: KubeObject) -> None:
        """Set defaults in place that are not in the schema."""

    def create(self, obj: KubeObject, store: Store) -> None:
        """Set fields in place that only the server sets; raises ApiError if admission rejects the object."""

    def update(self, new: KubeObject, old: KubeObject, subresource: str) -> None:
        """Restore fields in place that an update through `subresource` may not change."""

    def check(self, obj: KubeObject, old: KubeObject | None, subresource: str) -> list[Cause]:
        """Return errors that the schema does not find; `old` is None on a create."""
        return []

    def delete(self, obj: KubeObject) -> None:
        """Mark the beginning of a deletion in place; raises ApiError if the object may not be deleted."""

    def deletion_pending(self, obj: KubeObject) -> bool:
        """Return whether something other than `metadata.finalizers` blocks a deletion that has begun."""
        return False

    def grace(self, obj: KubeObject, requested: int | None) -> int:
        """Return the grace period of a deletion in seconds; 0 removes at once."""
        return 0


class Column(NamedTuple):
    """A printer column; `path` is a JSONPath, or for built-in kinds the name of a function."""

    name: str
    type: str
    path: str
    priority: int = 0
    format: str = ""
    missing: Any = None
    """Text for an object without the value."""


@dataclass(frozen=True, slots=True, eq=False)
class Resource:
    """One resource in one version."""

    group: str
    version: str
    plural: str
    kind: str
    node: SchemaNode
    rules: Rules
    published: KubeObject
    """The OpenAPI schema of a custom resource, or `{"$ref": ...}` of a built-in one."""
    namespaced: bool = True
    singular: str = ""
    list_kind: str = ""
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    has_status: bool = True
    counts_generation: bool = False
    fields: dict[str, str] = field(default_factory=dict)
    """Field selectors in addition to metadata.name and metadata.namespace, each with the value of a missing field."""
    scale: dict[str, str] = field(default_factory=dict)
    """Dotted paths of specReplicasPath, statusReplicasPath and labelSelectorPath; empty without the subresource."""
    custom: bool = False
    columns: tuple[Column, ...] = ()
    deprecation: str = ""
    """The warning of a deprecated version, for every response."""

    @property
    def key(self) -> ResourceKey:
        """The store key of its objects."""
        return self.group, self.plural

    @property
    def group_version(self) -> str:
        """The `apiVersion` of its objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def in_version(self, obj: KubeObject) -> KubeObject:
        """An object that may be stored in another version, in this one: only `apiVersion` differs."""
        same = not self.custom or obj.get("apiVersion") == self.group_version
        return obj if same else {**obj, "apiVersion": self.group_version}

    def not_found(self, name: str) -> ApiError:
        """Return the error 404 for one of its objects."""
        return on_object(404, "NotFound", "{} not found", self.group, self.plural, name)

    def conflict(self, name: str, why: str) -> ApiError:
        """Return the error 409 for one of its objects."""
        text = f"Operation cannot be fulfilled on {{}}: {why}"
        return on_object(409, "Conflict", text, self.group, self.plural, name)


def set_condition(obj: KubeObject, kind: str, status: str, time: str, **more: Any) -> None:
    """Set one of `status.conditions` in place."""
    conditions = obj.setdefault("status", {}).get("conditions") or ()
    new = {"type": kind, "status": status, "lastTransitionTime": time, **more}
    obj["status"]["conditions"] = [*(c for c in conditions if c["type"] != kind), new]
