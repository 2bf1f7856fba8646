"""Schemas of custom resources: a structural `openAPIV3Schema` read into nodes, with the fields every object has."""

from __future__ import annotations

from typing import Any

from meshwright.local.apiserver.schema.builtin import OBJECT_META, builtin_types
from meshwright.local.apiserver.schema.node import SchemaNode, fill

_STRING = {"type": "string"}


def custom_schema(raw: dict[str, Any] | None) -> SchemaNode:
    """The node of one version of a custom resource. Without a schema everything is kept and nothing checked."""
    root = _node(raw or {"type": "object", "x-kubernetes-preserve-unknown-fields": True})
    _make_object(root)
    return root


def published_schema(raw: dict[str, Any] | None, gvk: dict[str, str]) -> dict[str, Any]:
    """The schema as OpenAPI publishes it: with apiVersion, kind, metadata and the kind it belongs to."""
    body = dict(raw or {"type": "object", "x-kubernetes-preserve-unknown-fields": True})
    metadata = {"$ref": f"#/definitions/{OBJECT_META}"}
    body["properties"] = {
        **(body.get("properties") or {}),
        "apiVersion": {**_STRING, "description": "APIVersion of this object's representation."},
        "kind": {**_STRING, "description": "Kind of this object."},
        "metadata": {**metadata, "description": "Standard object's metadata."},
    }
    body["x-kubernetes-group-version-kind"] = [gvk]
    return body


def _node(raw: dict[str, Any]) -> SchemaNode:
    node = SchemaNode()
    fill(node, raw)
    node.properties = {key: _node(sub) for key, sub in (raw.get("properties") or {}).items()}
    extra = raw.get("additionalProperties")
    if isinstance(extra, dict):
        node.additional = _node(extra)
    elif extra is True:
        node.free = True
    if isinstance(raw.get("items"), dict):
        node.items = _node(raw["items"])
    if node.embedded:
        _make_object(node)
    return node


def _make_object(node: SchemaNode) -> None:
    node.properties = {
        **node.properties,
        "apiVersion": SchemaNode(type="string", raw=_STRING),
        "kind": SchemaNode(type="string", raw=_STRING),
        "metadata": builtin_types().node(OBJECT_META),
    }
