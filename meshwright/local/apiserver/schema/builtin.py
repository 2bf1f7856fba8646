"""Schemas of the built-in types, read from the OpenAPI definitions that Kubernetes publishes.

`data/definitions.json.gz` holds the definitions of the served groups as the API machinery describes them (types, list
keys, merge keys, group-version-kinds). Two facts that the definitions leave out are added here: which types are free
form, and the defaults that server-side apply needs to tell list items apart.
"""

from __future__ import annotations

import gzip
from functools import lru_cache
from importlib.resources import files
from typing import Any

import orjson

from meshwright.local.apiserver.schema.node import SchemaNode, fill

QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"
OBJECT_META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
STORAGE_CLASS = "io.k8s.api.storage.v1.StorageClass"

# A schema, or something simpler: where it is a schema it is checked like one.
_SCHEMA = "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSONSchemaProps"
_SCHEMA_OR_ELSE = (f"{_SCHEMA}OrArray", f"{_SCHEMA}OrBool")

# Protocol is part of the key of port lists, and a client may leave it out.
_KEY_DEFAULTS = {"io.k8s.api.core.v1.ContainerPort": "TCP", "io.k8s.api.core.v1.ServicePort": "TCP"}

_STORAGE_CLASS_SCHEMA: dict[str, Any] = {
    "description": "StorageClass describes the parameters for a class of storage for which PersistentVolumes can be "
    "dynamically provisioned.",
    "type": "object",
    "required": ["provisioner"],
    "properties": {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"$ref": f"#/definitions/{OBJECT_META}"},
        "provisioner": {"type": "string"},
        "parameters": {"type": "object", "additionalProperties": {"type": "string"}},
        "reclaimPolicy": {"type": "string", "enum": ["Delete", "Retain"]},
        "mountOptions": {"type": "array", "items": {"type": "string"}, "x-kubernetes-list-type": "atomic"},
        "allowVolumeExpansion": {"type": "boolean"},
        "volumeBindingMode": {"type": "string", "enum": ["Immediate", "WaitForFirstConsumer"]},
        "allowedTopologies": {
            "type": "array",
            "items": {"$ref": "#/definitions/io.k8s.api.core.v1.TopologySelectorTerm"},
            "x-kubernetes-list-type": "atomic",
        },
    },
    "x-kubernetes-group-version-kind": [{"group": "storage.k8s.io", "kind": "StorageClass", "version": "v1"}],
}


class BuiltinTypes:
    """All built-in types: their definitions as JSON, and their nodes, made when first asked for."""

    def __init__(self, definitions: dict[str, Any]) -> None:
        self.definitions = definitions
        self._nodes: dict[str, SchemaNode] = {}
        self._names = {
            (g["group"], g["version"], g["kind"]): name
            for name, definition in definitions.items()
            for g in definition.get("x-kubernetes-group-version-kind") or ()
        }

    def name_of(self, group: str, version: str, kind: str) -> str:
        """The definition's name of a kind.

        Raises:
            KeyError: the kind is not among the definitions.
        """
        return self._names[group, version, kind]

    def node(self, name: str) -> SchemaNode:
        """The node of a definition. Types may contain themselves, so a node is known before its children are."""
        found = self._nodes.get(name)
        if found is None:
            found = self._nodes[name] = SchemaNode()
            if name in _SCHEMA_OR_ELSE:
                found.properties = self.node(_SCHEMA).properties
            else:
                self._link(found, self.definitions[name], name)
        return found

    def _link(self, node: SchemaNode, raw: dict[str, Any], name: str = "") -> None:
        fill(node, raw)
        node.quantity = name == QUANTITY
        if name and not raw.get("properties") and raw.get("type") in (None, "object") and not node.int_or_string:
            node.free = True
        for key, sub in (raw.get("properties") or {}).items():
            node.properties[key] = self._child(sub)
        extra = raw.get("additionalProperties")
        if isinstance(extra, dict):
            node.additional = self._child(extra)
        if isinstance(raw.get("items"), dict):
            node.items = self._child(raw["items"])

    def _child(self, raw: dict[str, Any]) -> SchemaNode:
        reference = raw.get("$ref")
        if reference is None:
            node = SchemaNode()
            self._link(node, raw)
            return node
        return self.node(reference.rsplit("/", 1)[-1])


@lru_cache(maxsize=1)
def builtin_types() -> BuiltinTypes:
    """The types of this package's data; read once a process, they never change."""
    packed = files("meshwright.local.apiserver").joinpath("data", "definitions.json.gz").read_bytes()
    definitions = {name: _normal(node) for name, node in orjson.loads(gzip.decompress(packed)).items()}
    definitions[STORAGE_CLASS] = _STORAGE_CLASS_SCHEMA
    for name, protocol in _KEY_DEFAULTS.items():
        definitions[name]["properties"]["protocol"]["default"] = protocol
    return BuiltinTypes(definitions)


def _normal(node: Any) -> Any:
    """OpenAPI v2's way of writing: one type, references under `#/definitions`."""
    if isinstance(node, list):
        return [_normal(item) for item in node]
    if not isinstance(node, dict):
        return node
    out = {key: _normal(value) for key, value in node.items()}
    if isinstance(out.get("$ref"), str):
        out["$ref"] = "#/definitions/" + out["$ref"].rsplit("/", 1)[-1]
    if isinstance(out.get("type"), list):
        out["type"] = next(t for t in out["type"] if t != "null")
    choices = out.get("oneOf")
    if isinstance(choices, list) and all(isinstance(c, dict) and c.get("type") != "array" for c in choices):
        del out["oneOf"]
        out["x-kubernetes-int-or-string"] = True
    return out
