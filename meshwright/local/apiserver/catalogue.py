"""The built-in resources that are served.

Resources whose whole point is what an API server does with them are served only when this one does it: no
ResourceQuota, LimitRange or admission webhook is accepted and then ignored.
"""

from __future__ import annotations

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
from meshwright.local.apiserver.kinds.crds import CrdKind
from meshwright.local.apiserver.kinds.pods import PodKind
from meshwright.local.apiserver.resources import Resource
from meshwright.local.apiserver.schema.builtin import BuiltinTypes

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
_NODE_FIELDS = {"spec.unschedulable": "false"}


def builtin_resources(types: BuiltinTypes) -> Iterator[Resource]:
    """Every built-in resource, all in version v1."""
    for group, kind, plural, rules, more in (*_core(), *_workloads(), *_others()):
        name = types.name_of(group, "v1", kind)
        yield Resource(
            group,
            "v1",
            plural,
            kind,
            types.node(name),
            rules,
            singular=kind.lower(),
            list_kind=f"{kind}List",
            published={"$ref": f"#/definitions/{name}"},
            **more,
        )


_Entry = tuple[str, str, str, Kind, dict[str, Any]]


def _entry(group: str, kind: str, plural: str, rules: Kind | None = None, short: str = "", **more: Any) -> _Entry:
    return group, kind, plural, rules or Kind(), {"short_names": tuple(short.split()), **more}


def _core() -> Iterator[_Entry]:
    everywhere: dict[str, Any] = {"categories": ("all",)}
    pods: dict[str, Any] = {"fields": _POD_FIELDS, "counts_generation": True, **everywhere}
    yield _entry("", "Pod", "pods", PodKind(), "po", **pods)
    yield _entry("", "Service", "services", ServiceKind(), "svc", **everywhere)
    yield _entry("", "ConfigMap", "configmaps", DataKind(), "cm", has_status=False)
    yield _entry("", "Secret", "secrets", DataKind(), has_status=False, fields={"type": ""})
    yield _entry("", "Namespace", "namespaces", NamespaceKind(), "ns", namespaced=False, fields={"status.phase": ""})
    yield _entry("", "Event", "events", short="ev", has_status=False, fields=_EVENT_FIELDS)
    yield _entry("", "Node", "nodes", short="no", namespaced=False, fields=_NODE_FIELDS)
    yield _entry("", "PersistentVolumeClaim", "persistentvolumeclaims", ClaimKind(), "pvc")
    yield _entry("", "PersistentVolume", "persistentvolumes", VolumeKind(), "pv", namespaced=False)
    yield _entry("", "ServiceAccount", "serviceaccounts", ReturningKind(), "sa", has_status=False)
    yield _entry("", "Endpoints", "endpoints", short="ep", has_status=False)


def _workloads() -> Iterator[_Entry]:
    more: dict[str, Any] = {"categories": ("all",), "counts_generation": True}
    yield _entry("apps", "Deployment", "deployments", WorkloadKind(), "deploy", **more)
    yield _entry("apps", "ReplicaSet", "replicasets", WorkloadKind(), "rs", **more)
    yield _entry("apps", "StatefulSet", "statefulsets", WorkloadKind(), "sts", **more)
    yield _entry("apps", "DaemonSet", "daemonsets", WorkloadKind(), "ds", **more)
    yield _entry("batch", "Job", "jobs", WorkloadKind(), **more)
    yield _entry("batch", "CronJob", "cronjobs", short="cj", **more)


def _others() -> Iterator[_Entry]:
    classes: dict[str, Any] = {"namespaced": False, "has_status": False}
    counted: dict[str, Any] = {"counts_generation": True}
    yield _entry("coordination.k8s.io", "Lease", "leases", has_status=False)
    yield _entry(
        "scheduling.k8s.io", "PriorityClass", "priorityclasses", PriorityClassKind(), "pc", **classes, **counted
    )
    yield _entry("storage.k8s.io", "StorageClass", "storageclasses", StorageClassKind(), "sc", **classes)
    yield _entry("policy", "PodDisruptionBudget", "poddisruptionbudgets", short="pdb", **counted)
    for kind, plural in (("Role", "roles"), ("RoleBinding", "rolebindings")):
        yield _entry(_RBAC, kind, plural, RbacKind(), has_status=False)
        yield _entry(_RBAC, f"Cluster{kind}", f"cluster{plural}", RbacKind(), **classes)
    yield _entry("networking.k8s.io", "NetworkPolicy", "networkpolicies", short="netpol", has_status=False, **counted)
    yield _entry("networking.k8s.io", "Ingress", "ingresses", short="ing", **counted)
    definitions: dict[str, Any] = {"namespaced": False, **counted}
    yield _entry(
        "apiextensions.k8s.io",
        "CustomResourceDefinition",
        "customresourcedefinitions",
        CrdKind(),
        "crd crds",
        **definitions,
    )
