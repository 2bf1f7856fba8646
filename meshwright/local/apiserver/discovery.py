"""Discovery: which groups, versions and resources there are."""

from __future__ import annotations

from typing import Any

from meshwright.local.apiserver.registry import Registry
from meshwright.local.apiserver.resources import Resource

_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
_POD_SUBRESOURCES = (
    ("binding", "Binding", ["create"]),
    ("eviction", "Eviction", ["create"]),
    ("exec", "PodExecOptions", ["create", "get"]),
    ("log", "Pod", ["get"]),
)

REVIEWS = {
    ("authentication.k8s.io", "selfsubjectreviews"): "SelfSubjectReview",
    ("authentication.k8s.io", "tokenreviews"): "TokenReview",
    ("authorization.k8s.io", "selfsubjectaccessreviews"): "SelfSubjectAccessReview",
    ("authorization.k8s.io", "selfsubjectrulesreviews"): "SelfSubjectRulesReview",
    ("authorization.k8s.io", "subjectaccessreviews"): "SubjectAccessReview",
}
"""Resources that are asked rather than stored: (group, plural) -> kind."""


def discover(registry: Registry, path: str) -> dict[str, Any]:
    """The discovery document under a path.

    Raises:
        ApiError: 404.
    """
    parts = path.strip("/").split("/")
    groups = registry.groups()
    for group, _ in REVIEWS:
        groups.setdefault(group, ["v1"])
    if parts == ["api"]:
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if parts == ["apis"]:
        listed = [_group(name, versions) for name, versions in sorted(groups.items()) if name]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
    if parts[0] == "apis" and len(parts) == 2 and parts[1] in groups and parts[1]:
        return {"kind": "APIGroup", "apiVersion": "v1", **_group(parts[1], groups[parts[1]])}
    group, version = ("", parts[1]) if len(parts) == 2 and parts[0] == "api" else ("", "")
    if parts[0] == "apis" and len(parts) == 3:
        group, version = parts[1], parts[2]
    if not version or version not in groups.get(group, ()):
        raise registry.no_such_path(path)
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{group}/{version}" if group else version,
        "resources": _resources(registry, group, version),
    }


def _group(name: str, versions: list[str]) -> dict[str, Any]:
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


def _resources(registry: Registry, group: str, version: str) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for resource in sorted(registry, key=lambda r: r.plural):
        if (resource.group, resource.version) == (group, version):
            out += _entries(resource)
    for (owner, plural), kind in REVIEWS.items():
        if owner == group:
            out.append(_entry(plural, kind.lower(), False, kind, ["create"]))
    return out


def _entries(resource: Resource) -> list[dict[str, Any]]:
    main = _entry(resource.plural, resource.singular, resource.namespaced, resource.kind, _VERBS)
    if resource.short_names:
        main["shortNames"] = list(resource.short_names)
    if resource.categories:
        main["categories"] = list(resource.categories)
    entries = [main]

    def below(name: str, kind: str, verbs: list[str], **more: str) -> None:
        entries.append({**_entry(f"{resource.plural}/{name}", "", resource.namespaced, kind, verbs), **more})

    if resource.has_status:
        below("status", resource.kind, ["get", "patch", "update"])
    if resource.scale is not None:
        below("scale", "Scale", ["get", "patch", "update"], group="autoscaling", version="v1")
    if resource.key == ("", "namespaces"):
        below("finalize", "Namespace", ["update"])
    if resource.key == ("", "serviceaccounts"):
        below("token", "TokenRequest", ["create"], group="authentication.k8s.io", version="v1")
    if resource.key == ("", "pods"):
        for name, kind, verbs in _POD_SUBRESOURCES:
            more = {"group": "policy", "version": "v1"} if name == "eviction" else {}
            below(name, kind, verbs, **more)
    return entries


def _entry(name: str, singular: str, namespaced: bool, kind: str, verbs: list[str]) -> dict[str, Any]:
    return {"name": name, "singularName": singular, "namespaced": namespaced, "kind": kind, "verbs": verbs}
