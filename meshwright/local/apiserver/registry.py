"""The registry: every resource that is served, built-in ones and those that CustomResourceDefinitions add."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from meshwright.local.apiserver.kinds.base import Kind
from meshwright.local.apiserver.kinds.core import (
    ClaimKind,
    DataKind,
    NamespaceKind,
    PriorityClassKind,
    RbacKind,
    ReturningKind,
    ServiceKind,
    StorageClassKind,
    VolumeKind,
    WorkloadKind,
)
from meshwright.local.apiserver.kinds.crds import CrdKind, is_established
from meshwright.local.apiserver.kinds.pods import PodKind
from meshwright.local.apiserver.resources import Column, Resource, ScalePaths
from meshwright.local.apiserver.schema.builtin import BuiltinTypes, builtin_types
from meshwright.local.apiserver.schema.custom import custom_schema, published_schema
from meshwright.local.apiserver.store import ResourceKey

_RBAC = "rbac.authorization.k8s.io"
_POD_FIELDS = {
    "spec.nodeName": "",
    "spec.restartPolicy": "",
    "spec.schedulerName": "",
    "spec.serviceAccountName": "",
    "spec.hostNetwork": "false",
    "status.phase": "",
    "status.podIP": "",
    "status.nominatedNodeName": "",
}
_EVENT_FIELDS = {
    **{
        f"involvedObject.{n}": ""
        for n in ("kind", "namespace", "name", "uid", "apiVersion", "resourceVersion", "fieldPath")
    },
    "reason": "",
    "reportingComponent": "",
    "source.component": "",
    "type": "",
}
_VERSION = re.compile(r"v(\d+)(?:(alpha|beta)(\d+))?")


def _builtins(types: BuiltinTypes) -> Iterator[Resource]:
    def make(
        group: str, kind: str, plural: str, rules: Kind | None = None, version: str = "v1", **more: Any
    ) -> Resource:
        name = types.name_of(group, version, kind)
        return Resource(
            group,
            version,
            plural,
            kind,
            types.node(name),
            rules or Kind(),
            singular=kind.lower(),
            list_kind=f"{kind}List",
            published={"$ref": f"#/definitions/{name}"},
            **more,
        )

    pods: dict[str, Any] = {"short_names": ("po",), "categories": ("all",), "fields": _POD_FIELDS}
    yield make("", "Pod", "pods", PodKind(), counts_generation=True, **pods)
    yield make("", "Service", "services", ServiceKind(), short_names=("svc",), categories=("all",))
    yield make("", "ConfigMap", "configmaps", DataKind(), short_names=("cm",), has_status=False)
    yield make("", "Secret", "secrets", DataKind(), has_status=False, fields={"type": ""})
    namespaces: dict[str, Any] = {"namespaced": False, "short_names": ("ns",), "fields": {"status.phase": ""}}
    yield make("", "Namespace", "namespaces", NamespaceKind(), **namespaces)
    yield make("", "Event", "events", short_names=("ev",), has_status=False, fields=_EVENT_FIELDS)
    nodes: dict[str, Any] = {"namespaced": False, "short_names": ("no",), "fields": {"spec.unschedulable": "false"}}
    yield make("", "Node", "nodes", **nodes)
    yield make("", "PersistentVolumeClaim", "persistentvolumeclaims", ClaimKind(), short_names=("pvc",))
    yield make("", "PersistentVolume", "persistentvolumes", VolumeKind(), namespaced=False, short_names=("pv",))
    yield make("", "ServiceAccount", "serviceaccounts", ReturningKind(), short_names=("sa",), has_status=False)
    yield make("", "Endpoints", "endpoints", short_names=("ep",), has_status=False)
    yield make("", "ResourceQuota", "resourcequotas", ReturningKind(), short_names=("quota",))
    yield make("", "LimitRange", "limitranges", short_names=("limits",), has_status=False)
    for kind, plural, short in (
        ("Deployment", "deployments", "deploy"),
        ("ReplicaSet", "replicasets", "rs"),
        ("StatefulSet", "statefulsets", "sts"),
        ("DaemonSet", "daemonsets", "ds"),
    ):
        workload: dict[str, Any] = {"short_names": (short,), "categories": ("all",), "counts_generation": True}
        yield make("apps", kind, plural, WorkloadKind(), **workload)
    yield make("batch", "Job", "jobs", WorkloadKind(), categories=("all",), counts_generation=True)
    yield make("batch", "CronJob", "cronjobs", short_names=("cj",), categories=("all",), counts_generation=True)
    yield make("coordination.k8s.io", "Lease", "leases", has_status=False)
    classes: dict[str, Any] = {"namespaced": False, "has_status": False}
    priority: dict[str, Any] = {"short_names": ("pc",), "counts_generation": True, **classes}
    yield make("scheduling.k8s.io", "PriorityClass", "priorityclasses", PriorityClassKind(), **priority)
    yield make("storage.k8s.io", "StorageClass", "storageclasses", StorageClassKind(), short_names=("sc",), **classes)
    budgets: dict[str, Any] = {"short_names": ("pdb",), "counts_generation": True}
    yield make("policy", "PodDisruptionBudget", "poddisruptionbudgets", **budgets)
    for kind, plural in (("Role", "roles"), ("RoleBinding", "rolebindings")):
        yield make(_RBAC, kind, plural, RbacKind(), has_status=False)
        yield make(_RBAC, f"Cluster{kind}", f"cluster{plural}", RbacKind(), **classes)
    policies: dict[str, Any] = {"short_names": ("netpol",), "has_status": False, "counts_generation": True}
    yield make("networking.k8s.io", "NetworkPolicy", "networkpolicies", **policies)
    yield make("networking.k8s.io", "Ingress", "ingresses", short_names=("ing",), counts_generation=True)
    definitions: dict[str, Any] = {"namespaced": False, "short_names": ("crd", "crds"), "counts_generation": True}
    yield make(
        "apiextensions.k8s.io", "CustomResourceDefinition", "customresourcedefinitions", CrdKind(), **definitions
    )


class Registry:
    """Resources by group, version and plural name."""

    def __init__(self) -> None:
        self.types = builtin_types()
        self.stamp = 0
        """Grows with every change, so that what was derived from the registry can be cached."""
        self._resources = {(r.group, r.version, r.plural): r for r in _builtins(self.types)}

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
