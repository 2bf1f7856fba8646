"""A schema as a graph of nodes: what the general rules of pruning, defaulting, merging and checking walk.

Built-in types (OpenAPI definitions with `$ref`) and the structural schemas of custom resources are both read into it
once, so that nothing resolves references or guesses at shapes while a request is handled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_LIMITS = frozenset(
    f"{bound}{what}" for bound in ("min", "max") for what in ("Length", "Items", "Properties", "imum")
) | {"enum", "pattern", "format", "multipleOf", "uniqueItems"}

MISSING: Any = object()
"""Stands for "no default", since null can be one."""


@dataclass(slots=True, eq=False)
class SchemaNode:
    """What one place of an object may hold."""

    type: str | None = None
    properties: dict[str, SchemaNode] = field(default_factory=dict)
    additional: SchemaNode | None = None
    """Schema of keys that `properties` does not name; None: no other keys."""
    items: SchemaNode | None = None
    free: bool = False
    """Whether unknown keys are kept (`x-kubernetes-preserve-unknown-fields`, and types without fields)."""
    embedded: bool = False
    """Whether this is a whole object with apiVersion, kind and metadata (`x-kubernetes-embedded-resource`)."""
    nullable: bool = False
    int_or_string: bool = False
    quantity: bool = False
    default: Any = MISSING
    required: tuple[str, ...] = ()
    list_type: str = "atomic"
    list_keys: tuple[str, ...] = ()
    atomic_map: bool = False
    merge_key: str = ""
    merges: bool = False
    """Whether a strategic merge patch merges this list rather than replacing it."""
    retains_keys: bool = False
    limited: bool = False
    """Whether there is anything beyond the type to check a value against."""
    raw: dict[str, Any] = field(default_factory=dict)
    """The schema as written: limits, enum, pattern, format, CEL rules, allOf and its kin."""

    def child(self, key: str) -> SchemaNode | None:
        """The node of a key; None when the key is not known."""
        found = self.properties.get(key)
        if found is not None:
            return found
        if self.additional is not None:
            return self.additional
        return FREE if self.free else None

    @property
    def keyed_list(self) -> bool:
        """A list whose items are told apart by some of their fields."""
        return self.list_type == "map"

    @property
    def granular(self) -> bool:
        """Whether parts of this value have owners of their own, rather than the whole having one."""
        return self.list_type in ("map", "set") if self.type == "array" else not self.atomic_map


FREE = SchemaNode(free=True, nullable=True)
"""Anything at all."""


def fill(node: SchemaNode, raw: dict[str, Any]) -> None:
    """Set what a node takes from its own schema; its children are linked by whoever reads the schema."""
    kind = raw.get("type")
    node.type = next((t for t in kind if t != "null"), None) if isinstance(kind, list) else kind
    node.int_or_string = bool(raw.get("x-kubernetes-int-or-string"))
    node.embedded = bool(raw.get("x-kubernetes-embedded-resource"))
    node.free = bool(raw.get("x-kubernetes-preserve-unknown-fields"))
    node.nullable = bool(raw.get("nullable"))
    if "default" in raw:
        node.default = raw["default"]
    node.required = tuple(raw.get("required") or ())
    node.list_type = raw.get("x-kubernetes-list-type") or "atomic"
    node.list_keys = tuple(raw.get("x-kubernetes-list-map-keys") or ())
    node.atomic_map = raw.get("x-kubernetes-map-type") == "atomic"
    strategy = raw.get("x-kubernetes-patch-strategy") or ""
    node.merges = "merge" in strategy
    node.retains_keys = "retainKeys" in strategy
    node.merge_key = raw.get("x-kubernetes-patch-merge-key") or ""
    node.limited = not _LIMITS.isdisjoint(raw)
    node.raw = raw
