"""Schemas as graphs of nodes, which pruning, defaulting, merging and validation traverse.

The OpenAPI definitions of the built-in types and the structural schemas of custom resources are parsed into nodes once,
so that no request has to resolve references. `data/definitions.json.gz` has the built-in types in the form of OpenAPI
v2: names, types, formats, enums, required fields and `x-kubernetes-*` extensions (group-version-kinds, list types,
merge keys). It has no descriptions.
"""

from __future__ import annotations

import copy
import gzip
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Any

import orjson

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver.status_errors import Cause, invalid_value
from meshwright_local.kube import quantities

OBJECT_META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
MISSING: Any = object()
"""Marks that there is no default, because null can be a default."""

_QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"
_SCHEMA = "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaProps"
# A schema or a simpler value. A schema is validated as one.
_SCHEMA_OR_ELSE = (f"{_SCHEMA}OrArray", f"{_SCHEMA}OrBool")
# Protocol is part of the key of port lists, and clients may leave it out.
_KEY_DEFAULTS = {"io.k8s.api.core.v1.ContainerPort": "TCP", "io.k8s.api.core.v1.ServicePort": "TCP"}
_LIMITS = {f"{bound}{what}" for bound in ("min", "max") for what in ("Length", "Items", "Properties", "imum")}
_LIMITS |= {"enum", "pattern", "format", "multipleOf", "uniqueItems", "allOf", "anyOf", "oneOf", "not"}
_STRING = {"type": "string"}
_ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_STORAGE_CLASS = "io.k8s.api.storage.v1.StorageClass"
_STORAGE_CLASS_SCHEMA: KubeObject = {
    "type": "object",
    "required": ["provisioner"],
    "properties": {
        **dict.fromkeys(("apiVersion", "kind", "provisioner"), _STRING),
        "metadata": {"$ref": f"#/definitions/{OBJECT_META}"},
        "parameters": {"type": "object", "additionalProperties": _STRING},
        "reclaimPolicy": {"type": "string", "enum": ["Delete", "Retain"], "default": "Delete"},
        "mountOptions": {"type": "array", "items": _STRING},
        "allowVolumeExpansion": {"type": "boolean"},
        "volumeBindingMode": {"type": "string", "enum": ["Immediate", "WaitForFirstConsumer"], "default": "Immediate"},
    },
    "x-kubernetes-group-version-kind": [{"group": "storage.k8s.io", "kind": "StorageClass", "version": "v1"}],
}


@dataclass(slots=True, eq=False)
class SchemaNode:
    """The schema of one field. `raw` is the schema as written: limits, CEL rules, `anyOf` and the like."""

    raw: KubeObject = field(default_factory=dict)
    type: str | None = None
    properties: dict[str, SchemaNode] = field(default_factory=dict)
    additional: SchemaNode | None = None
    """Schema of keys that are not in `properties`; None: no other keys."""
    items: SchemaNode | None = None
    free: bool = False
    """Whether unknown keys are preserved (`x-kubernetes-preserve-unknown-fields`, and types without fields)."""
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
    """Whether a strategic merge patch merges this list instead of replacing it."""
    limited: bool = False
    """Whether a value must be validated beyond its type."""
    ruled: bool = False
    """Whether this field or one below it has rules in CEL. Those of built-in types have none."""

    def child(self, key: str) -> SchemaNode | None:
        """Return the node of a key; None if the key is unknown."""
        return self.properties.get(key) or self.additional or (FREE if self.free else None)

    def read(self, raw: KubeObject) -> None:
        """Copy the schema's properties of this field. The caller links its children."""
        strategy = raw.get("x-kubernetes-patch-strategy") or ""
        self.raw, self.type = raw, raw.get("type")
        self.int_or_string = bool(raw.get("x-kubernetes-int-or-string"))
        self.free = bool(raw.get("x-kubernetes-preserve-unknown-fields"))
        self.nullable, self.default = bool(raw.get("nullable")), raw.get("default", MISSING)
        self.required = tuple(raw.get("required") or ())
        self.list_type = raw.get("x-kubernetes-list-type") or "atomic"
        self.list_keys = tuple(sorted(raw.get("x-kubernetes-list-map-keys") or ()))
        self.atomic_map = raw.get("x-kubernetes-map-type") == "atomic"
        self.merges, self.merge_key = "merge" in strategy, raw.get("x-kubernetes-patch-merge-key") or ""
        self.limited = not _LIMITS.isdisjoint(raw)


FREE = SchemaNode(free=True, nullable=True)
"""Return a node that accepts any value."""


class BuiltinTypes:
    """All built-in types: their definitions as JSON, and their nodes, created on first use."""

    def __init__(self, definitions: KubeObject) -> None:
        self.definitions = definitions
        self._nodes: dict[str, SchemaNode] = {}
        self.names = {
            (gvk["group"], gvk["version"], gvk["kind"]): name
            for name, definition in definitions.items()
            for gvk in definition.get("x-kubernetes-group-version-kind") or ()
        }
        """Names of definitions by group, version and kind."""

    def node(self, name: str) -> SchemaNode:
        """Return the node of a definition. Types may be recursive, so a node is registered before its children."""
        if name not in self._nodes:
            found = self._nodes[name] = SchemaNode()
            if name in _SCHEMA_OR_ELSE:
                found.properties = self.node(_SCHEMA).properties
            else:
                self._link(found, self.definitions[name])
                found.quantity = name == _QUANTITY
                found.free = not found.properties and found.type in (None, "object") and not found.int_or_string
        return self._nodes[name]

    def _link(self, node: SchemaNode, raw: KubeObject) -> None:
        node.read(raw)
        node.properties = {key: self._child(sub) for key, sub in (raw.get("properties") or {}).items()}
        if isinstance(raw.get("additionalProperties"), dict):
            node.additional = self._child(raw["additionalProperties"])
        if isinstance(raw.get("items"), dict):
            node.items = self._child(raw["items"])

    def _child(self, raw: KubeObject) -> SchemaNode:
        if "$ref" in raw:
            return self.node(raw["$ref"].rsplit("/", 1)[-1])
        node = SchemaNode()
        self._link(node, raw)
        return node


@lru_cache(maxsize=1)
def builtin_types() -> BuiltinTypes:
    """Load the built-in types of `data/definitions.json.gz`, once per process."""
    packed = files("meshwright_local.apiserver").joinpath("data", "definitions.json.gz").read_bytes()
    definitions: KubeObject = orjson.loads(gzip.decompress(packed))
    definitions[_STORAGE_CLASS] = _STORAGE_CLASS_SCHEMA
    for name, protocol in _KEY_DEFAULTS.items():
        definitions[name]["properties"]["protocol"]["default"] = protocol
    return BuiltinTypes(definitions)


def custom_schema(raw: KubeObject | None) -> SchemaNode:
    """Return the node of one version of a custom resource. Without a schema, nothing is pruned or validated."""
    return _custom({**(raw or _ANYTHING), "x-kubernetes-embedded-resource": True})


def published_schema(raw: KubeObject | None, gvk: dict[str, str]) -> KubeObject:
    """Return a custom resource's schema for OpenAPI, with apiVersion, kind, metadata and its group-version-kind."""
    body = dict(raw or _ANYTHING)
    metadata = {"$ref": f"#/definitions/{OBJECT_META}", "description": "Name, labels, annotations, owners."}
    own = {"apiVersion": _STRING, "kind": _STRING, "metadata": metadata}
    return {**body, "properties": {**(body.get("properties") or {}), **own}, "x-kubernetes-group-version-kind": [gvk]}


def _custom(raw: KubeObject) -> SchemaNode:
    node = SchemaNode()
    node.read(raw)
    node.properties = {key: _custom(sub) for key, sub in (raw.get("properties") or {}).items()}
    extra = raw.get("additionalProperties")
    node.additional = _custom(extra) if isinstance(extra, dict) else None
    node.free = node.free or extra is True
    node.items = _custom(raw["items"]) if isinstance(raw.get("items"), dict) else None
    below = (*node.properties.values(), node.additional, node.items)
    node.ruled = bool(raw.get("x-kubernetes-validations")) or any(sub is not None and sub.ruled for sub in below)
    if raw.get("x-kubernetes-embedded-resource"):
        text = SchemaNode(type="string", raw=_STRING)
        node.properties |= {"apiVersion": text, "kind": text, "metadata": builtin_types().node(OBJECT_META)}
    return node


def prune(node: SchemaNode, value: Any, path: str = "") -> list[str]:
    """Remove unknown fields in place, and nulls that are not allowed. Return the paths of unknown fields."""
    dropped: list[str] = []
    if isinstance(value, dict) and node is not FREE:
        for key in list(value):
            current_path = f"{path}.{key}" if path else key
            sub = node.child(key)
            if sub is None:
                if node.type is not None or node.properties:
                    dropped.append(current_path)
                    del value[key]
            elif value[key] is None and not sub.nullable:
                if sub.default is MISSING:
                    del value[key]
            else:
                dropped += prune(sub, value[key], current_path)
    elif isinstance(value, list) and node.items is not None:
        for index, item in enumerate(value):
            dropped += prune(node.items, item, f"{path}[{index}]")
    return dropped


def apply_defaults(node: SchemaNode, value: Any) -> None:
    """Set defaults in place, parents before children, also for a null that is not allowed."""
    if isinstance(value, dict):
        for key, sub in node.properties.items():
            if sub.default is not MISSING and (key not in value or (value[key] is None and not sub.nullable)):
                value[key] = copy.deepcopy(sub.default)
        for key, item in value.items():
            child = node.child(key)
            if child is not None and child is not FREE:
                apply_defaults(child, item)
    elif isinstance(value, list) and node.items is not None:
        for item in value:
            apply_defaults(node.items, item)


def drop_empty(node: SchemaNode, value: Any) -> None:
    """Remove empty lists and empty maps of optional fields in place, as the structs of built-in kinds have none."""
    if isinstance(value, dict):
        for key, item in list(value.items()):
            sub = node.child(key)
            if sub is None or sub is FREE or sub.free:
                continue
            drop_empty(sub, item)
            plain_map = sub.additional is not None and not sub.properties
            if key not in node.required and (item == [] or (item == {} and plain_map)):
                del value[key]
    elif isinstance(value, list) and node.items is not None:
        for item in value:
            drop_empty(node.items, item)


def canonicalize(node: SchemaNode, value: Any, path: str = "") -> list[Cause]:
    """Convert every quantity below `value` to its canonical form in place. Return the errors of invalid ones."""
    causes: list[Cause] = []
    places = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(places):
        sub = node.items if isinstance(key, int) else node.child(key)
        current_path = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}".lstrip(".")
        if sub is None or sub is FREE:
            continue
        if sub.quantity and not isinstance(item, dict | list):
            try:
                value[key] = quantities.canonical(item)
            except ValueError as error:
                causes.append(invalid_value(current_path, item, str(error)))
        else:
            causes += canonicalize(sub, item, current_path)
    return causes
