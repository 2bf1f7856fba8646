"""Resources: what is served under one group, version and plural name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from meshwright.local.apiserver.errors import ApiError, conflict, not_found
from meshwright.local.apiserver.kinds.base import Kind
from meshwright.local.apiserver.schema.node import SchemaNode
from meshwright.local.apiserver.store import ResourceKey


@dataclass(frozen=True, slots=True)
class ScalePaths:
    """Where the scale subresource of a custom resource finds its numbers; dotted paths without the first dot."""

    spec_replicas: str
    status_replicas: str
    selector: str


@dataclass(frozen=True, slots=True)
class Column:
    """A printer column of a custom resource."""

    name: str
    type: str
    json_path: str
    priority: int = 0
    description: str = ""
    format: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Resource:
    """One resource in one version."""

    group: str
    version: str
    plural: str
    kind: str
    node: SchemaNode
    rules: Kind
    namespaced: bool = True
    singular: str = ""
    list_kind: str = ""
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    has_status: bool = True
    counts_generation: bool = False
    fields: dict[str, str] = field(default_factory=dict)
    """Field selectors beside metadata.name and metadata.namespace, each with the value of an object that lacks it."""
    scale: ScalePaths | None = None
    custom: bool = False
    columns: tuple[Column, ...] = ()
    published: dict[str, Any] = field(default_factory=dict)
    """The OpenAPI schema of a custom resource, or `{"$ref": ...}` of a built-in one."""

    @property
    def key(self) -> ResourceKey:
        """Where its objects are stored."""
        return self.group, self.plural

    @property
    def group_version(self) -> str:
        """The `apiVersion` of its objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """The name in messages, such as `deployments.apps`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def not_found(self, name: str) -> ApiError:
        """404 for one of its objects."""
        return not_found(self.group, self.plural, name)

    def conflict(self, name: str, why: str) -> ApiError:
        """409 for one of its objects."""
        return conflict(self.group, self.plural, name, why)


def field_value(obj: dict[str, Any], path: str) -> Any:
    """What stands under a dotted path; None when nothing does."""
    value: Any = obj
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
