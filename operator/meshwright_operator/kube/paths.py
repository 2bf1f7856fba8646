"""Paths of the API server's resources."""

from __future__ import annotations

from urllib.parse import quote

from meshwright.api.labels import GROUP, PLURAL, VERSION

JOBS = f"/apis/{GROUP}/{VERSION}"
CORE = "/api/v1"
LEASES = "/apis/coordination.k8s.io/v1"
NETWORKING = "/apis/networking.k8s.io/v1"


def resource_of(path: str) -> str:
    """The resource in a path, such as `pods` or `paralleltrainingjobs/status`, for the label of a metric."""
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    if parts[:1] == ["namespaces"] and len(parts) > 2:
        parts = parts[2:]
    return "/".join([parts[0], *parts[2:3]]) if parts else ""


def jobs_path(namespace: str | None, name: str | None = None) -> str:
    """Path of a job, of the jobs of a namespace, or of all jobs."""
    return _path(JOBS, namespace, PLURAL, name)


def pods_path(namespace: str | None, name: str | None = None) -> str:
    """Path of a pod, of the pods of a namespace, or of all pods."""
    return _path(CORE, namespace, "pods", name)


def core_path(namespace: str | None, resource: str, name: str | None = None) -> str:
    """Path in the core group."""
    return _path(CORE, namespace, resource, name)


def lease_path(namespace: str, name: str | None = None) -> str:
    """Path of a Lease."""
    return _path(LEASES, namespace, "leases", name)


def network_policies_path(namespace: str, name: str | None = None) -> str:
    """Path of a NetworkPolicy, or of those of a namespace."""
    return _path(NETWORKING, namespace, "networkpolicies", name)


def _path(root: str, namespace: str | None, resource: str, name: str | None) -> str:
    where = f"/namespaces/{quote(namespace)}" if namespace else ""
    return f"{root}{where}/{resource}" + (f"/{quote(name)}" if name else "")
