"""API resources: the URL paths of each kind on a Kubernetes API server, and what raw objects say."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.api import labels
from meshwright.api.objects import KubeObject


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of object that an API server stores."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """`group/version`, or `v1` for the core group."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the URL path of a collection (without `namespace`: of all namespaces), an object or a subresource."""
        parts = ["/apis", self.group, self.version] if self.group else ["/api", self.version]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        return "/".join([*parts, self.plural, *(part for part in (name, subresource) if part)])


PODS = Resource("", "v1", "pods", "Pod")
NODES = Resource("", "v1", "nodes", "Node", namespaced=False)
EVENTS = Resource("", "v1", "events", "Event")
SECRETS = Resource("", "v1", "secrets", "Secret")
SERVICES = Resource("", "v1", "services", "Service")
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
NAMESPACES = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
VOLUMES = Resource("", "v1", "persistentvolumes", "PersistentVolume", namespaced=False)
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
REPLICA_SETS = Resource("apps", "v1", "replicasets", "ReplicaSet")
BUDGETS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
LEASE_NAMESPACE = "kube-node-lease"
"""Namespace of the nodes' leases."""
CRDS = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False)
JOBS = Resource(labels.GROUP, labels.VERSION, labels.PLURAL, labels.KIND)


def key_of(item: KubeObject) -> tuple[str, str]:
    """Return `(namespace, name)` of an object; the namespace is empty for cluster-scoped objects."""
    return item["metadata"].get("namespace") or "", item["metadata"]["name"]


def has_ended(pod: KubeObject) -> bool:
    """Return whether the containers of a pod have exited for good, so that it no longer occupies resources."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
