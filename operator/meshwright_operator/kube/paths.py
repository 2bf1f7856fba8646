"""Paths of the API server's resources."""

from __future__ import annotations

from urllib.parse import quote, unquote

from meshwright.api.labels import GROUP, PLURAL, VERSION

JOBS = f"/apis/{GROUP}/{VERSION}"
CORE = "/api/v1"
DEVICES = "/apis/resource.k8s.io/v1"
COMPUTE_DOMAINS = "/apis/resource.nvidia.com/v1beta1"
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


def claims_path(namespace: str, resource: str, name: str | None = None) -> str:
    """Path of a ResourceClaim or ResourceClaimTemplate, or of those of a namespace."""
    return _path(DEVICES, namespace, resource, name)


def compute_domains_path(namespace: str, name: str | None = None) -> str:
    """Path of a ComputeDomain of NVIDIA's driver, or of those of a namespace."""
    return _path(COMPUTE_DOMAINS, namespace, "computedomains", name)


def lease_path(namespace: str, name: str | None = None) -> str:
    """Path of a Lease."""
    return _path(LEASES, namespace, "leases", name)


def group_path(group: str, version: str, namespace: str | None, resource: str, name: str | None = None) -> str:
    """Path in any other group."""
    return _path(f"/apis/{group}/{version}", namespace, resource, name)


def network_policies_path(namespace: str, name: str | None = None) -> str:
    """Path of a NetworkPolicy, or of those of a namespace."""
    return _path(NETWORKING, namespace, "networkpolicies", name)


def is_safe(path: str) -> bool:
    """Whether a path leads where it was built to lead: each of its parts is one name.

    Users choose names that end up in paths, such as that of a claim. With `../` in one, the operator would read or
    change an object of another namespace. No object has a `%` in its name, and the API server answers 400 to one.
    """
    return not any(part in ("", ".", "..") or set("/%") & set(part) for part in map(unquote, path.split("/")[1:]))


def _path(root: str, namespace: str | None, resource: str, name: str | None) -> str:
    where = f"/namespaces/{quote(namespace, safe='')}" if namespace else ""
    return f"{root}{where}/{resource}" + (f"/{quote(name, safe='')}" if name else "")
