"""The resource requests of pods, reduced to what placement needs.

Thousands of full pods would take hundreds of megabytes, and most of them have the same requests. So requests are stored
as JSON strings, which the pods of a gang share and which are parsed once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from sys import intern
from typing import Any

import orjson

from meshwright.api.labels import METRICS_PORT
from meshwright.api.objects import KubeObject
from meshwright.planner.cluster.inventory import MALFORMED
from meshwright.planner.cluster.pod_resources import (
    HOST_PORT,
    Resources,
    claimed_devices,
    host_ports,
    is_terminal,
    job_of,
    occupied_node,
    spec_request,
)

REQUEST_FIELDS = ("overhead", "resources")
CONTAINERS = ("containers", "initContainers")
CONTAINER_REQUEST_FIELDS = ("resources", "restartPolicy")


@dataclass(frozen=True, slots=True)
class PodRequest:
    """A pod that has not terminated, and its resource requests."""

    name: str
    namespace: str
    node: str
    request_json: str
    """Its resource requests, as `request_json_of` writes them."""
    job: str = ""
    """Name of its job; empty for a foreign pod."""
    job_uid: str = ""

    def amount(self, gpu_resource: str) -> Resources:
        """The resources it requests.

        Raises:
            One of MALFORMED: Its requests cannot be parsed.
        """
        return _amount(self.request_json, gpu_resource)


def request_json_of(pod: Mapping[str, Any]) -> str:
    """The fields of a raw pod that contain its requests, as JSON; `null` if they are malformed."""
    spec = pod.get("spec") or {}
    try:
        trimmed = {key: spec[key] for key in REQUEST_FIELDS if spec.get(key)}
        for key in CONTAINERS:
            if spec.get(key):
                trimmed[key] = [{k: c[k] for k in CONTAINER_REQUEST_FIELDS if k in c} for c in spec[key]]
        if devices := claimed_devices(pod):
            trimmed["claimed"] = devices
        if host_ports(spec):
            trimmed["hostNetwork"] = True
            trimmed["containers"][0]["ports"] = [{"containerPort": METRICS_PORT}]
        return intern(orjson.dumps(trimmed, option=orjson.OPT_SORT_KEYS).decode())
    except (*MALFORMED, orjson.JSONEncodeError):
        return "null"


@lru_cache(maxsize=4096)
def has_claims(request_json: str) -> bool:
    """Whether a request contains devices that the pod claims through Dynamic Resource Allocation."""
    return bool((orjson.loads(request_json) or {}).get("claimed"))


@lru_cache(maxsize=4096)
def _amount(request_json: str, gpu_resource: str) -> Resources:
    spec = orjson.loads(request_json)
    if spec is None:
        raise ValueError("its containers cannot be parsed")
    return spec_request(spec, spec.pop("claimed", None) or {}, gpu_resource)


def read_pod_request(obj: Mapping[str, Any], node_by_hostname: Mapping[str, str]) -> PodRequest | None:
    """Parse the requests of a raw pod; None if it has terminated, occupies no node, or is malformed."""
    try:
        node = None if is_terminal(obj) else occupied_node(obj, node_by_hostname)
        if node is None:
            return None
        metadata, job = obj["metadata"], job_of(obj)
        where = str(metadata.get("namespace", ""))
        return PodRequest(metadata["name"], where, node, request_json_of(obj), job.get("name", ""), job.get("uid", ""))
    except MALFORMED:
        return None


def request_json_for(amount: Resources, gpu_resource: str) -> str:
    """The same JSON for a pod that does not exist yet."""
    requests = {gpu_resource: amount.gpus, "cpu": f"{amount.cpu_milli}m", "memory": amount.memory_bytes}
    requests |= {name: count for name, count in amount.others if not name.startswith(HOST_PORT)}
    container: KubeObject = {"resources": {"requests": requests}}
    spec: KubeObject = {"containers": [container]}
    if any(name.startswith(HOST_PORT) for name, _ in amount.others):
        container["ports"], spec["hostNetwork"] = [{"containerPort": METRICS_PORT}], True
    return request_json_of({"spec": spec})


def requested_by_node(pod_requests: Iterable[PodRequest], gpu_resource: str) -> tuple[dict[str, Resources], list[str]]:
    """Node -> resources that these pods request there, and a message for each pod that could not be counted."""
    malformed: list[str] = []
    counts: Counter[tuple[str, str]] = Counter()
    for requested_resources in pod_requests:
        try:
            requested_resources.amount(gpu_resource)
        except MALFORMED as error:
            malformed.append(f"pod {requested_resources.name} was not counted: its object is malformed ({error})")
        else:
            counts[requested_resources.node, requested_resources.request_json] += 1
    requested: dict[str, Resources] = {}
    for (node, request_json), count in counts.items():
        requested[node] = requested.get(node, Resources()) + _amount(request_json, gpu_resource) * count
    return requested, malformed
