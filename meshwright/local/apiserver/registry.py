"""The registry: every resource that is served, built-in ones and those that CustomResourceDefinitions add."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from meshwright.local.apiserver.catalogue import builtin_resources
from meshwright.local.apiserver.errors import ApiError, UnservedPath, unknown_path
from meshwright.local.apiserver.kinds.base import Kind
from meshwright.local.apiserver.kinds.crds import is_established
from meshwright.local.apiserver.resources import Column, Resource, ScalePaths
from meshwright.local.apiserver.schema.builtin import builtin_types
from meshwright.local.apiserver.schema.custom import custom_schema, published_schema
from meshwright.local.apiserver.store import ResourceKey

_VERSION = re.compile(r"v(\d+)(?:(alpha|beta)(\d+))?")


class Registry:
    """Resources by group, version and plural name."""

    def __init__(self) -> None:
        self.types = builtin_types()
        self.stamp = 0
        """Grows with every change, so that what was derived from the registry can be cached."""
        self._resources = {(r.group, r.version, r.plural): r for r in builtin_resources(self.types)}

    def get(self, group: str, version: str, plural: str) -> Resource | None:
        """The resource, or None."""
        return self._resources.get((group, version, plural))

    def any_version(self, key: ResourceKey) -> Resource | None:
        """The resource in its preferred version, or None."""
        found = [r for r in self._resources.values() if r.key == key]
        return min(found, key=lambda r: version_rank(r.version)) if found else None

    def __iter__(self) -> Iterator[Resource]:
        return iter(list(self._resources.values()))

    def groups(self) -> dict[str, list[str]]:
        """Groups and their versions, the preferred one first."""
        groups: dict[str, set[str]] = {}
        for group, version, _ in self._resources:
            groups.setdefault(group, set()).add(version)
        return {group: sorted(versions, key=version_rank) for group, versions in sorted(groups.items())}

    def no_such_path(self, path: str) -> ApiError:
        """What a path gets that names nothing: plain text, but for one inside a group that is built in."""
        parts = path.strip("/").split("/")
        if parts[0] == "api":
            return unknown_path()
        built_in = {resource.group for resource in self if not resource.custom and resource.group}
        if parts[0] == "apis" and len(parts) > 2 and parts[1] in built_in:
            return unknown_path()
        return UnservedPath()

    def define(self, crd: dict[str, Any]) -> None:
        """Serve what a definition says, in place of what it said before."""
        self.undefine(crd)
        if not is_established(crd):
            return
        for version in crd["spec"]["versions"]:
            if version.get("served"):
                resource = _custom(crd["spec"], version)
                self._resources[resource.group, resource.version, resource.plural] = resource

    def undefine(self, crd: dict[str, Any]) -> None:
        """Serve a definition's resources no longer."""
        key = crd_key(crd)
        self._resources = {k: r for k, r in self._resources.items() if not (r.custom and r.key == key)}
        self.stamp += 1


def crd_key(crd: dict[str, Any]) -> ResourceKey:
    """Where the objects of a definition are stored."""
    return crd["spec"]["group"], crd["spec"]["names"]["plural"]


def version_rank(version: str) -> tuple[int, int, int, str]:
    """Order of versions: stable before beta before alpha, newer before older, others last by name."""
    match = _VERSION.fullmatch(version)
    if match is None:
        return 3, 0, 0, version
    major, stage, minor = match.groups()
    return {None: 0, "beta": 1, "alpha": 2}[stage], -int(major), -int(minor or 0), version


def _custom(spec: dict[str, Any], version: dict[str, Any]) -> Resource:
    names, subresources = spec["names"], version.get("subresources") or {}
    raw = (version.get("schema") or {}).get("openAPIV3Schema")
    gvk = {"group": spec["group"], "version": version["name"], "kind": names["kind"]}
    scale = subresources.get("scale")
    return Resource(
        spec["group"],
        version["name"],
        names["plural"],
        names["kind"],
        custom_schema(raw),
        Kind(),
        namespaced=spec["scope"] == "Namespaced",
        singular=names.get("singular") or names["kind"].lower(),
        list_kind=names.get("listKind") or names["kind"] + "List",
        short_names=tuple(names.get("shortNames") or ()),
        categories=tuple(names.get("categories") or ()),
        has_status="status" in subresources,
        counts_generation=True,
        fields={f["jsonPath"].lstrip("."): "" for f in version.get("selectableFields") or ()},
        scale=_scale_paths(scale) if scale else None,
        custom=True,
        columns=tuple(
            Column(
                c["name"], c["type"], c["jsonPath"], c.get("priority", 0), c.get("description", ""), c.get("format", "")
            )
            for c in version.get("additionalPrinterColumns") or ()
        ),
        published=published_schema(raw, gvk),
    )


def _scale_paths(scale: dict[str, Any]) -> ScalePaths:
    return ScalePaths(
        scale["specReplicasPath"].lstrip("."),
        scale["statusReplicasPath"].lstrip("."),
        scale.get("labelSelectorPath", "").lstrip("."),
    )
