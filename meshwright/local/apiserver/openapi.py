"""OpenAPI: v3 per group and version (kubectl apply and explain), v2 in one document (older clients)."""

from __future__ import annotations

from typing import Any

import orjson

from meshwright.local.apiserver.errors import ApiError, UnservedPath
from meshwright.local.apiserver.registry import Registry
from meshwright.local.apiserver.resources import Resource
from meshwright.local.apiserver.version import GIT_VERSION

_INFO = {"title": "Kubernetes", "version": GIT_VERSION}
# kubectl looks for fieldValidation among the parameters of a PATCH before it trusts the server to check fields.
_PARAMETERS = [
    {"name": name, "in": "query", "schema": {"type": "string", "uniqueItems": True}}
    for name in ("dryRun", "fieldManager", "fieldValidation")
]


class OpenApi:
    """Documents derived from a registry, kept until it changes."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._stamp = -1
        self._documents: dict[str, bytes] = {}

    def document(self, path: str, accept: str) -> bytes:
        """The JSON document under `/openapi/...`.

        Raises:
            ApiError: 404, or 406 for protobuf, which is not served.
        """
        if self._stamp != self._registry.stamp:
            self._stamp = self._registry.stamp
            self._documents.clear()
        name = path.removeprefix("/openapi/").strip("/")
        if name == "v2" and "protobuf" in accept and "json" not in accept:
            raise ApiError(406, "NotAcceptable", "only application/json is served here")
        if name not in self._documents:
            self._documents[name] = orjson.dumps(self._make(name))
        return self._documents[name]

    def _make(self, name: str) -> dict[str, Any]:
        if name == "v2":
            return self._v2()
        members = {path: r for r in self._registry for path in [_path(r)]}
        if name == "v3":
            return {
                "paths": {
                    path: {"serverRelativeURL": f"/openapi/v3/{path}?hash={self._stamp}"} for path in sorted(members)
                }
            }
        wanted = name.removeprefix("v3/")
        if wanted not in members:
            raise UnservedPath
        return self._v3([r for r in self._registry if _path(r) == wanted], wanted)

    def _v2(self) -> dict[str, Any]:
        definitions = dict(self._registry.types.definitions)
        for resource in self._registry:
            if resource.custom:
                definitions[_schema_name(resource)] = resource.published
        return {"swagger": "2.0", "info": _INFO, "paths": {}, "definitions": definitions}

    def _v3(self, resources: list[Resource], path: str) -> dict[str, Any]:
        schemas: dict[str, Any] = {}
        paths: dict[str, Any] = {}
        for resource in resources:
            name = _schema_name(resource)
            if resource.custom:
                schemas[name] = self._copy(resource.published, schemas)
            else:
                self._copy(resource.published, schemas)
            paths.update(_operations(resource, path, name))
        return {"openapi": "3.0.0", "info": _INFO, "paths": paths, "components": {"schemas": schemas}}

    def _copy(self, node: Any, schemas: dict[str, Any]) -> Any:
        """A schema with its references pointing into this document, and all it refers to collected there."""
        if isinstance(node, list):
            return [self._copy(item, schemas) for item in node]
        if not isinstance(node, dict):
            return node
        reference = node.get("$ref")
        if not isinstance(reference, str):
            return {key: self._copy(value, schemas) for key, value in node.items()}
        name = reference.rsplit("/", 1)[-1]
        if name not in schemas:
            schemas[name] = {}
            schemas[name] = self._copy(self._registry.types.definitions[name], schemas)
        link = {"$ref": f"#/components/schemas/{name}"}
        rest = {key: value for key, value in node.items() if key != "$ref"}
        return {**rest, "allOf": [link]} if rest else link


def _path(resource: Resource) -> str:
    return f"apis/{resource.group_version}" if resource.group else f"api/{resource.version}"


def _schema_name(resource: Resource) -> str:
    if not resource.custom:
        return str(resource.published["$ref"]).rsplit("/", 1)[-1]
    return ".".join([*reversed(resource.group.split(".")), resource.version, resource.kind])


def _operations(resource: Resource, path: str, schema: str) -> dict[str, Any]:
    gvk = {"group": resource.group, "version": resource.version, "kind": resource.kind}
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    common = {
        "parameters": _PARAMETERS,
        "responses": {"200": {"description": "OK", "content": content}},
        "x-kubernetes-group-version-kind": gvk,
    }
    base = f"/{path}" + ("/namespaces/{namespace}" if resource.namespaced else "") + f"/{resource.plural}"
    single = {verb: {**common, "x-kubernetes-action": verb} for verb in ("get", "put", "patch", "delete")}
    many = {
        "get": {**common, "x-kubernetes-action": "list"},
        "post": {**common, "x-kubernetes-action": "post"},
    }
    return {base: many, base + "/{name}": single}
