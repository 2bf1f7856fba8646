"""The cluster roles for users: `view`, `edit` and `admin`, to which charts and operators add the rules of their kinds.

Each is an aggregate: its rules are those of all cluster roles with its label. `edit` includes `view`, `admin` both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from meshwright.api.objects import KubeObject
from meshwright_local.kube.selectors import labels_match

_LABEL = "rbac.authorization.k8s.io/aggregate-to-"
_READ, _WRITE = ["get", "list", "watch"], ["create", "delete", "deletecollection", "patch", "update"]
_KINDS = {
    "": ["configmaps", "endpoints", "persistentvolumeclaims", "pods", "serviceaccounts", "services"],
    "apps": ["daemonsets", "deployments", "deployments/scale", "replicasets", "replicasets/scale"]
    + ["statefulsets", "statefulsets/scale"],
    "batch": ["cronjobs", "jobs"],
    "networking.k8s.io": ["ingresses", "networkpolicies"],
    "policy": ["poddisruptionbudgets"],
}
_SEEN = ["events", "limitranges", "namespaces", "pods/log", "resourcequotas"]


def _rules(kinds: dict[str, list[str]], verbs: list[str]) -> list[Any]:
    return [{"apiGroups": [group], "resources": names, "verbs": verbs} for group, names in kinds.items()]


def user_roles() -> Iterator[KubeObject]:
    """Return the aggregates, and the roles with the rules for built-in kinds."""
    statuses = {
        group: [*names, *(f"{name}/status" for name in names if "/" not in name)] for group, names in _KINDS.items()
    }
    own = {
        "view": _rules({**statuses, "": [*statuses[""], *_SEEN]}, _READ),
        "edit": _rules(_KINDS, _WRITE)
        + _rules({"": ["secrets"], "coordination.k8s.io": ["leases"]}, [*_READ, *_WRITE])
        + _rules({"": ["pods/attach", "pods/exec", "pods/portforward", "pods/proxy"]}, ["get", "create"])
        + _rules({"": ["events", "pods/eviction", "serviceaccounts/token"]}, ["create", "patch", "update"])
        + _rules({"": ["serviceaccounts"]}, ["impersonate"]),
        "admin": _rules({"rbac.authorization.k8s.io": ["rolebindings", "roles"]}, [*_READ, *_WRITE]),
    }
    larger = {"view": "edit", "edit": "admin"}
    for name, rules in own.items():
        labels = {"kubernetes.io/bootstrapping": "rbac-defaults"}
        above = {f"{_LABEL}{larger[name]}": "true"} if name in larger else {}
        selectors = [{"matchLabels": {f"{_LABEL}{name}": "true"}}]
        role = {"metadata": {"name": name, "labels": {**labels, **above}}}
        yield {**role, "aggregationRule": {"clusterRoleSelectors": selectors}, "rules": []}
        part = {"name": f"system:aggregate-to-{name}", "labels": {**labels, f"{_LABEL}{name}": "true"}}
        yield {"metadata": part, "rules": rules}


def rules_of(role: KubeObject, roles: Iterable[KubeObject]) -> list[KubeObject]:
    """Return the rules of a role: its own, or, for an aggregate, those of all cluster roles that it selects."""
    everything, seen, waiting, found = list(roles), set[str](), [role], list[KubeObject]()
    while waiting:
        current = waiting.pop()
        name, selectors = (
            current["metadata"]["name"],
            (current.get("aggregationRule") or {}).get("clusterRoleSelectors"),
        )
        if name in seen:
            continue
        seen.add(name)
        if not selectors:
            found += current.get("rules") or ()
            continue
        waiting += [
            other
            for other in everything
            if any(labels_match(selector, other["metadata"].get("labels") or {}) for selector in selectors)
        ]
    return found
