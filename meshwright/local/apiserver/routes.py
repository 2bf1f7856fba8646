"""Paths of the API: which resource, object and subresource a URL names."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.local.apiserver.resources import Resource


@dataclass(frozen=True, slots=True)
class Target:
    """What a path names. Empty strings stand for what it does not say."""

    group: str
    version: str
    plural: str
    namespace: str = ""
    name: str = ""
    subresource: str = ""


def parse_target(path: str) -> Target | None:
    """The target of a path below `/api/<version>/` or `/apis/<group>/<version>/`; None for any other path."""
    parts = path.strip("/").split("/")
    if parts[0] == "api" and len(parts) >= 3:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[0] == "apis" and len(parts) >= 4:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return None
    namespace = ""
    of_namespace = not group and len(rest) == 3 and rest[2] in ("status", "finalize")
    if rest[0] == "namespaces" and len(rest) > 2 and not of_namespace:
        namespace, rest = rest[1], rest[2:]
    plural, name, *below = [*rest, ""] if len(rest) == 1 else rest
    return Target(group, version, plural, namespace, name, "/".join(below))


def fits(target: Target, resource: Resource) -> bool:
    """Whether a path is one of this resource's: namespaced objects are named inside their namespace only."""
    if resource.namespaced:
        return bool(target.namespace) or not target.name
    return not target.namespace


def verb_of(method: str, target: Target, *, watch: bool) -> str:
    """The verb that authorization speaks of; empty for a method that nothing knows."""
    if method in ("GET", "HEAD"):
        # One object cannot be watched by its path: there, `watch` means nothing.
        return "get" if target.name else "watch" if watch else "list"
    verbs = {"POST": "create", "PUT": "update", "PATCH": "patch"}
    return verbs.get(method, "") if method != "DELETE" else "delete" if target.name else "deletecollection"
