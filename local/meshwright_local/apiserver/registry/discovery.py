"""The registry of served groups, versions and resources; discovery documents and OpenAPI.

OpenAPI v3 is served per group and version (kubectl apply and explain), v2 in one document (older clients).
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

import orjson

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver.registry.builtin_kinds import builtin_resources
from meshwright_local.apiserver.registry.crds import crd_key, custom_resources, version_rank
from meshwright_local.apiserver.resource_types import Resource
from meshwright_local.apiserver.schema.structural import builtin_types
from meshwright_local.apiserver.status_errors import ApiError, unknown_group_path, unknown_path
from meshwright_local.apiserver.store import ResourceKey

GIT_VERSION = "v1.36.0-meshwright-embedded"
VERSION: KubeObject = {
    "major": "1",
    "minor": "36",
    "gitVersion": GIT_VERSION,
    **dict.fromkeys(("gitCommit", "gitTreeState", "goVersion"), ""),
    "buildDate": "1970-01-01T00:00:00Z",
    "compiler": f"Python {platform.python_version()}",
    "platform": f"linux/{platform.machine()}",
}
"""The document under `/version`: the release whose behavior this server follows, marked as embedded."""

REVIEWS = {
    ("authentication.k8s.io", "selfsubjectreviews"): "SelfSubjectReview",
    ("authentication.k8s.io", "tokenreviews"): "TokenReview",
    ("authorization.k8s.io", "selfsubjectaccessreviews"): "SelfSubjectAccessReview",
    ("authorization.k8s.io", "selfsubjectrulesreviews"): "SelfSubjectRulesReview",
    ("authorization.k8s.io", "subjectaccessreviews"): "SubjectAccessReview",
}
"""Review resources, which are not stored: (group, plural) -> kind."""

_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
# Resource -> its subresources: name, kind, verbs, group of the kind if it differs.
_SUBRESOURCES: dict[ResourceKey, tuple[tuple[str, str, list[str], str], ...]] = {
    ("", "namespaces"): (("finalize", "Namespace", ["update"], ""),),
    ("", "serviceaccounts"): (("token", "TokenRequest", ["create"], "authentication.k8s.io"),),
    ("", "pods"): (
        ("attach", "PodAttachOptions", ["create", "get"], ""),
        ("binding", "Binding", ["create"], ""),
        ("ephemeralcontainers", "Pod", ["get", "patch", "update"], ""),
        ("eviction", "Eviction", ["create"], "policy"),
        ("exec", "PodExecOptions", ["create", "get"], ""),
        ("log", "Pod", ["get"], ""),
        ("portforward", "PodPortForwardOptions", ["create", "get"], ""),
        ("proxy", "PodProxyOptions", ["get"], ""),
    ),
}
_INFO = {"title": "Kubernetes", "version": GIT_VERSION}


def _field(number: int, content: bytes) -> bytes:
    """A field of a protobuf message: a string or a message of fewer than 128 bytes."""
    return bytes([number << 3 | 2, len(content)]) + content


# gnostic's `openapi.v2.Document`: `swagger`, and `info` with `title` and `version`.
_EMPTY_V2 = _field(1, b"2.0") + _field(2, _field(1, _INFO["title"].encode()) + _field(2, GIT_VERSION.encode()))
# kubectl relies on the server to validate fields only if PATCH has the parameter fieldValidation.
_PARAMETERS = [
    {"name": name, "in": "query", "schema": {"type": "string", "uniqueItems": True}}
    for name in ("dryRun", "fieldManager", "fieldValidation")
]


class Registry:
    """Resources by group, version and plural name: built-in ones, and those of definitions."""

    def __init__(self) -> None:
        self._resources = {(r.group, r.version, r.plural): r for r in builtin_resources()}
        self._stamp = 0
        self._documents: dict[str, bytes] = {}

    def __iter__(self) -> Iterator[Resource]:
        return iter(list(self._resources.values()))

    def get(self, group: str, version: str, plural: str) -> Resource | None:
        """Return the resource, or None."""
        return self._resources.get((group, version, plural))

    def builtin(self, key: ResourceKey) -> Resource:
        """Return a built-in resource."""
        return self._resources[key[0], "v1", key[1]]

    def any_version(self, key: ResourceKey) -> Resource | None:
        """Return the resource in its preferred version, or None."""
        found = [r for r in self._resources.values() if r.key == key]
        return min(found, key=lambda r: version_rank(r.version)) if found else None

    def define(self, crd: KubeObject) -> None:
        """Serve the resources of a definition, and no longer those of its earlier state."""
        self.undefine(crd)
        self._resources |= {(r.group, r.version, r.plural): r for r in custom_resources(crd)}

    def undefine(self, crd: KubeObject) -> None:
        """Stop serving a definition's resources."""
        key = crd_key(crd)
        self._resources = {k: r for k, r in self._resources.items() if not (r.custom and r.key == key)}
        self._stamp += 1
        self._documents.clear()

    def no_such_path(self, path: str) -> ApiError:
        """Return the error of an unknown path: plain text, except inside a built-in group."""
        parts = path.strip("/").split("/")
        built_in = {resource.group for resource in self if not resource.custom and resource.group}
        known = parts[0] == "api" or (parts[0] == "apis" and len(parts) > 2 and parts[1] in built_in)
        return unknown_path() if known else unknown_group_path()

    def _versions(self) -> dict[str, list[str]]:
        """Return the versions of each group, the preferred one first."""
        found: dict[str, set[str]] = {group: {"v1"} for group, _ in REVIEWS}
        for resource in self:
            found.setdefault(resource.group, set()).add(resource.version)
        return {group: sorted(found[group], key=version_rank) for group in sorted(found)}

    def aggregated(self, path: str) -> KubeObject:
        """Return all resources of the core group (`/api`) or of all other groups (`/apis`) in one document."""
        items = [
            {"metadata": {"name": group, "creationTimestamp": None}, "versions": self._discovered(group, versions)}
            for group, versions in self._versions().items()
            if bool(group) == (path == "/apis")
        ]
        head = {"kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {}}
        return {**head, "items": items}

    def _discovered(self, group: str, versions: list[str]) -> list[KubeObject]:
        found = []
        for version in versions:
            resources: list[KubeObject] = []
            for entry in self._listed(group, version):
                # Empty: that of the resource itself.
                kind = {"group": entry.get("group", ""), "version": entry.get("version", ""), "kind": entry["kind"]}
                plural, _, below = entry["name"].partition("/")
                shown = {"responseKind": kind, "verbs": entry["verbs"]}
                if below:
                    resources[-1].setdefault("subresources", []).append({"subresource": below, **shown})
                    continue
                scope = "Namespaced" if entry["namespaced"] else "Cluster"
                shown |= {key: entry[key] for key in ("shortNames", "categories") if key in entry}
                singular = entry["singularName"]
                resources.append({"resource": plural, "scope": scope, "singularResource": singular, **shown})
            found.append({"version": version, "resources": resources, "freshness": "Current"})
        return found

    def _listed(self, group: str, version: str) -> list[KubeObject]:
        """Return the entries of one group and version, each resource before its subresources."""
        own = [r for r in self if (r.group, r.version) == (group, version)]
        listed = [entry for resource in sorted(own, key=lambda r: r.plural) for entry in _entries(resource)]
        asked = [(plural, kind) for (owner, plural), kind in REVIEWS.items() if (owner, "v1") == (group, version)]
        return listed + [_entry(plural, kind.lower(), False, kind, ["create"]) for plural, kind in asked]

    def discover(self, path: str) -> KubeObject:
        """Return the discovery document of a path; raises ApiError 404."""
        parts, versions = path.strip("/").split("/"), self._versions()
        if parts == ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
        if parts == ["apis"]:
            groups = [_group(name, versions[name]) for name in versions if name]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        if parts[0] == "apis" and len(parts) == 2 and parts[1] in versions:
            return {"kind": "APIGroup", "apiVersion": "v1", **_group(parts[1], versions[parts[1]])}
        group, *version = parts[1:] if parts[0] == "apis" else ["", *parts[1:]]
        if parts[0] not in ("api", "apis") or len(version) != 1 or version[0] not in versions.get(group, ()):
            raise self.no_such_path(path)
        text = f"{group}/{version[0]}" if group else version[0]
        listed = self._listed(group, version[0])
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": text, "resources": listed}

    def openapi(self, path: str, accept: str) -> tuple[bytes, str]:
        """The document of `/openapi/...` and its content type.

        In protobuf, v2 names no types. kubectl asks for it about kinds that v3 does not have, and then says that there
        is no such kind.

        Raises:
            ApiError: 404, there is no such document.
        """
        name = path.removeprefix("/openapi/").strip("/")
        if name == "v2" and "protobuf" in accept and "json" not in accept:
            return _EMPTY_V2, "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"
        if name not in self._documents:
            self._documents[name] = orjson.dumps(self._openapi(name))
        return self._documents[name], "application/json"

    def _openapi(self, name: str) -> KubeObject:
        if name == "v2":
            own = {_schema_name(r): r.published for r in self if r.custom}
            return {"swagger": "2.0", "info": _INFO, "paths": {}, "definitions": {**builtin_types().definitions, **own}}
        paths = sorted({_path(r) for r in self})
        if name == "v3":
            return {"paths": {p: {"serverRelativeURL": f"/openapi/v3/{p}?hash={self._stamp}"} for p in paths}}
        members = [r for r in self if f"v3/{_path(r)}" == name]
        if not members:
            raise unknown_group_path()
        schemas: KubeObject = {}
        operations: KubeObject = {}
        for resource in members:
            schema = _relinked(resource.published, schemas)
            schemas |= {_schema_name(resource): schema} if resource.custom else {}
            operations |= _operations(resource)
        return {"openapi": "3.0.0", "info": _INFO, "paths": operations, "components": {"schemas": schemas}}


def _group(name: str, versions: list[str]) -> KubeObject:
    listed = [{"groupVersion": f"{name}/{v}", "version": v} for v in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


def _entry(name: str, singular: str, namespaced: bool, kind: str, verbs: list[str]) -> KubeObject:
    return {"name": name, "singularName": singular, "namespaced": namespaced, "kind": kind, "verbs": verbs}


def _entries(resource: Resource) -> Iterator[KubeObject]:
    verbs = [verb for verb in _VERBS if resource.plural != "namespaces" or verb != "deletecollection"]
    main = _entry(resource.plural, resource.singular, resource.namespaced, resource.kind, verbs)
    main |= {"shortNames": list(resource.short_names)} if resource.short_names else {}
    yield main | ({"categories": list(resource.categories)} if resource.categories else {})
    below = list(_SUBRESOURCES.get(resource.key, ()))
    below += [("status", resource.kind, ["get", "patch", "update"], "")] if resource.has_status else []
    below += [("scale", "Scale", ["get", "patch", "update"], "autoscaling")] if resource.scale else []
    for name, kind, verbs, group in below:
        entry = _entry(f"{resource.plural}/{name}", "", resource.namespaced, kind, verbs)
        yield entry | ({"group": group, "version": "v1"} if group else {})


def _relinked(node: Any, schemas: KubeObject) -> Any:
    """Return a schema with references into one document; adds all referenced schemas to `schemas`."""
    if isinstance(node, list):
        return [_relinked(item, schemas) for item in node]
    if not isinstance(node, dict):
        return node
    rest = {key: _relinked(value, schemas) for key, value in node.items() if key != "$ref"}
    if not isinstance(node.get("$ref"), str):
        return rest | ({"$ref": _relinked(node["$ref"], schemas)} if "$ref" in node else {})
    name = node["$ref"].rsplit("/", 1)[-1]
    if name not in schemas:
        schemas[name] = {}
        schemas[name] = _relinked(builtin_types().definitions[name], schemas)
    link = {"$ref": f"#/components/schemas/{name}"}
    return {**rest, "allOf": [link]} if rest else link


def _path(resource: Resource) -> str:
    return f"{'apis' if resource.group else 'api'}/{resource.group_version}"


def _schema_name(resource: Resource) -> str:
    if not resource.custom:
        return str(resource.published["$ref"]).rsplit("/", 1)[-1]
    return ".".join([*reversed(resource.group.split(".")), resource.version, resource.kind])


def _operations(resource: Resource) -> KubeObject:
    schema = {"$ref": f"#/components/schemas/{_schema_name(resource)}"}
    common = {
        "parameters": _PARAMETERS,
        "responses": {"200": {"description": "OK", "content": {"application/json": {"schema": schema}}}},
        "x-kubernetes-group-version-kind": {
            "group": resource.group,
            "version": resource.version,
            "kind": resource.kind,
        },
    }
    base = f"/{_path(resource)}{'/namespaces/{namespace}' if resource.namespaced else ''}/{resource.plural}"
    single = {verb: {**common, "x-kubernetes-action": verb} for verb in ("get", "put", "patch", "delete")}
    many = {verb: {**common, "x-kubernetes-action": action} for verb, action in (("get", "list"), ("post", "post"))}
    return {base: many, base + "/{name}": single}
