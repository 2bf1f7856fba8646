"""A pod's resource requests and its node, as the Kubernetes scheduler computes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from meshwright.api.labels import ANNOTATION_DEVICES, KIND, METRICS_PORT
from meshwright.api.objects import is_sidecar
from meshwright.api.workers import WorkersSpec
from meshwright.planner.cluster.quantities import parse_quantity

_UNLIMITED = 1 << 62
HOSTNAME_LABEL = "kubernetes.io/hostname"
EPHEMERAL_STORAGE = "ephemeral-storage"
HUGE_PAGES = "hugepages-"
HOST_PORT = "host-port/"
"""Name of a port of the node as a resource, of which each node has one."""
DEFAULT_SCHEDULER = "default-scheduler"
LONGEST_CLAIMS = 8192
MAX_CLAIMED = 4096
"""Longest annotation with the claimed devices of a pod, and most devices of a kind: the pod's user can change it."""


Amounts = tuple[tuple[str, int], ...]
"""Resource name -> amount, sorted by name, without zeros. A tuple, because most pods share few of them."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of a node or of a pod. CPU in thousandths of a core, memory in bytes."""

    gpus: int = 0
    cpu_milli: int = 0
    memory_bytes: int = 0
    pods: int = 0
    others: Amounts = ()
    """Other resources, such as network devices, huge pages and local storage, by their Kubernetes names. Devices as a
    number, the others in bytes."""

    def __add__(self, other: Resources) -> Resources:
        return Resources(
            self.gpus + other.gpus,
            self.cpu_milli + other.cpu_milli,
            self.memory_bytes + other.memory_bytes,
            self.pods + other.pods,
            _combined(self.others, other.others, int.__add__)
            if self.others and other.others
            else self.others or other.others,
        )

    def __sub__(self, other: Resources) -> Resources:
        return self + other * -1

    def __mul__(self, count: int) -> Resources:
        return Resources(
            self.gpus * count,
            self.cpu_milli * count,
            self.memory_bytes * count,
            self.pods * count,
            tuple((name, amount * count) for name, amount in self.others) if count else (),
        )

    def __floordiv__(self, parts: int) -> Resources:
        """An equal share, rounded down."""
        return Resources(
            self.gpus // parts,
            self.cpu_milli // parts,
            self.memory_bytes // parts,
            self.pods // parts,
            tuple((name, share) for name, amount in self.others if (share := amount // parts)),
        )

    def fits(self, each: Resources) -> int:
        """How many times `each` fits in this amount, at least 0.

        Resources that `each` does not request do not count.
        """
        # Each placement asks this of all nodes several times: one comparison each is twice as fast as a list of them.
        most = self.gpus // each.gpus if each.gpus > 0 else _UNLIMITED
        if each.cpu_milli > 0:
            most = min(most, self.cpu_milli // each.cpu_milli)
        if each.memory_bytes > 0:
            most = min(most, self.memory_bytes // each.memory_bytes)
        if each.pods > 0:
            most = min(most, self.pods // each.pods)
        if each.others:
            here = dict(self.others)
            most = min([most, *(_amount(here, name) // wanted for name, wanted in each.others if wanted > 0)])
        return max(0, most) if most != _UNLIMITED else 0

    def short_of(self, each: Resources) -> list[str]:
        """The Kubernetes names of the resources, except GPUs, of which there is too little for one `each`."""
        here = dict(self.others)
        pairs = [
            ("cpu", self.cpu_milli, each.cpu_milli),
            ("memory", self.memory_bytes, each.memory_bytes),
            ("pods", self.pods, each.pods),
            *((name, _amount(here, name), wanted) for name, wanted in each.others),
        ]
        return [name for name, available, wanted in pairs if 0 < wanted > available]


def _amount(here: Mapping[str, int], name: str) -> int:
    """How much there is of a resource. Nodes do not list their ports, so that only used ones are in `here`."""
    return here.get(name, 0) + name.startswith(HOST_PORT)


def _combined(first: Amounts, second: Amounts, operation: Callable[[int, int], int]) -> Amounts:
    amounts = dict(first)
    for name, amount in second:
        amounts[name] = operation(amounts.get(name, 0), amount)
    return tuple(sorted((name, amount) for name, amount in amounts.items() if amount))


def parse_resources(resources: Mapping[str, Any], gpu_resource: str, pods: int | None = None) -> Resources:
    """Parse resources of a Kubernetes object. CPU, memory and other sizes are rounded up.

    Raises:
        ValueError: a value is not a quantity.
    """
    return Resources(
        gpus=int(parse_quantity(resources.get(gpu_resource, 0))),
        cpu_milli=ceil(parse_quantity(resources.get("cpu", 0)) * 1000),
        memory_bytes=ceil(parse_quantity(resources.get("memory", 0))),
        pods=int(parse_quantity(resources.get("pods", 0))) if pods is None else pods,
        others=_others(resources, gpu_resource),
    )


def _others(resources: Mapping[str, Any], gpu_resource: str) -> Amounts:
    """Extended resources, huge pages and local storage."""
    found = (
        (name, ceil(parse_quantity(value)))
        for name, value in resources.items()
        if name != gpu_resource and ("/" in name or name == EPHEMERAL_STORAGE or name.startswith(HUGE_PAGES))
    )
    return tuple(sorted((name, amount) for name, amount in found if amount))


def worker_requests(workers: WorkersSpec) -> dict[str, str]:
    """What the container of a worker pod requests, by Kubernetes' names of resources."""
    asked = workers.resources
    found = {workers.gpu_resource: str(workers.gpus_per_worker)}
    found |= {name: value for name, value in (("cpu", asked.cpu), ("memory", asked.memory)) if value}
    found |= {name: str(number) for name, number in (asked.devices or {}).items()}
    found |= {f"{HUGE_PAGES}{size}": value for size, value in (asked.huge_pages or {}).items()}
    return found | ({EPHEMERAL_STORAGE: asked.ephemeral_storage} if asked.ephemeral_storage else {})


def is_terminal(pod: Mapping[str, Any]) -> bool:
    """Whether the pod has succeeded or failed and occupies no resources."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def pod_request(pod: Mapping[str, Any], gpu_resource: str) -> Resources:
    """The pod's request: the sum of its containers, or an init container with a larger request, and the overhead.

    Sidecars (init containers that restart) are added to the containers, and to the init containers after them. A limit
    without a request is a request.

    Raises:
        ValueError: a quantity is malformed.
    """
    return spec_request(pod.get("spec") or {}, claimed_devices(pod), gpu_resource)


def spec_request(spec: Mapping[str, Any], claimed: Mapping[str, int], gpu_resource: str) -> Resources:
    """The request of a pod with this spec that claims these devices: see `pod_request`.

    Raises:
        ValueError: a quantity is malformed.
    """
    running = _summed(spec.get("containers") or (), gpu_resource)
    running += parse_resources(claimed, gpu_resource)
    peak = sidecars = Resources()
    for container in spec.get("initContainers") or ():
        requests = _container(container, gpu_resource)
        if is_sidecar(container):
            sidecars += requests
        else:
            peak = _elementwise_max(peak, sidecars + requests)
    container_requests = _elementwise_max(running + sidecars, peak)
    pod_level_requests = _requests(spec.get("resources") or {})
    pod_level = parse_resources(pod_level_requests, gpu_resource)
    requested = Resources(
        gpus=container_requests.gpus,
        cpu_milli=pod_level.cpu_milli if "cpu" in pod_level_requests else container_requests.cpu_milli,
        memory_bytes=pod_level.memory_bytes if "memory" in pod_level_requests else container_requests.memory_bytes,
        pods=1,
        # At pod level, Kubernetes takes huge pages beside CPU and memory. Devices are requested by containers.
        others=_combined(_overridden(container_requests.others, pod_level.others), host_ports(spec), max),
    )
    return requested + parse_resources(spec.get("overhead") or {}, gpu_resource)


def job_of(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """The reference to the job that owns the pod; empty if none does."""
    owners = (pod.get("metadata") or {}).get("ownerReferences") or ()
    return next((one for one in owners if one.get("controller") and one.get("kind") == KIND), {})


def claimed_devices(pod: Mapping[str, Any]) -> dict[str, int]:
    """What a worker pod claims through Dynamic Resource Allocation, by resource, from its annotation.

    Any user can set the annotation, and a pod that takes capacity only in the operator's books would block a node. So
    it counts for a pod that a job owns and that has claims, and only what can be a number of devices.
    """
    text = ((pod.get("metadata") or {}).get("annotations") or {}).get(ANNOTATION_DEVICES)
    if not text or not job_of(pod) or not (pod.get("spec") or {}).get("resourceClaims"):
        return {}
    try:
        found = json.loads(text) if len(text) <= LONGEST_CLAIMS else None
    except (ValueError, RecursionError):
        return {}
    return {name: count for name, count in found.items() if _is_claim(name, count)} if isinstance(found, dict) else {}


def _is_claim(name: str, count: object) -> bool:
    return "/" in name and isinstance(count, int) and not isinstance(count, bool) and 0 < count <= MAX_CLAIMED


def host_ports(spec: Mapping[str, Any]) -> Amounts:
    """The port of the node on which the pod serves metrics as a worker. Two such pods cannot share a node."""
    if not spec.get("hostNetwork"):
        return ()
    ports = [port for container in spec.get("containers") or () for port in container.get("ports") or ()]
    return ((f"{HOST_PORT}{METRICS_PORT}", 1),) if any(p.get("containerPort") == METRICS_PORT for p in ports) else ()


def node_of(pod: Mapping[str, Any], node_by_hostname: Mapping[str, str]) -> str | None:
    """The node that the pod is bound to or, while it is gated or pending, pinned to. None if it may get any node."""
    spec = pod.get("spec") or {}
    if spec.get("nodeName"):
        return str(spec["nodeName"])
    hostname = (spec.get("nodeSelector") or {}).get(HOSTNAME_LABEL)
    if hostname:
        return node_by_hostname.get(str(hostname), str(hostname))
    required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ) or {}
    terms = required.get("nodeSelectorTerms") or []
    if len(terms) != 1:
        return None
    name = _only_value(terms[0].get("matchFields") or (), "metadata.name")
    if name is not None:
        return name
    hostname = _only_value(terms[0].get("matchExpressions") or (), HOSTNAME_LABEL)
    return None if hostname is None else node_by_hostname.get(hostname, hostname)


def occupied_node(pod: Mapping[str, Any], node_by_hostname: Mapping[str, str]) -> str | None:
    """The node on which the pod's requests count. None if it may get any node, or waits for what may never come.

    A pod that a job owns counts where it is pinned: the operator has granted the node. Any other one must be bound, or
    about to be. Otherwise users could take nodes away from jobs with pods that never start.
    """
    bound = bool((pod.get("spec") or {}).get("nodeName"))
    return node_of(pod, node_by_hostname) if bound or job_of(pod) or _is_about_to_be_bound(pod) else None


def _is_about_to_be_bound(pod: Mapping[str, Any]) -> bool:
    """Whether kube-scheduler looks at the pod, and has not found yet that it fits nowhere."""
    spec = pod.get("spec") or {}
    if spec.get("schedulingGates") or spec.get("schedulerName", DEFAULT_SCHEDULER) != DEFAULT_SCHEDULER:
        return False
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return not any((one.get("type"), one.get("status")) == ("PodScheduled", "False") for one in conditions)


def _only_value(expressions: Iterable[Mapping[str, Any]], key: str) -> str | None:
    for expression in expressions:
        values = expression.get("values") or []
        if expression.get("key") == key and expression.get("operator") == "In" and len(values) == 1:
            return str(values[0])
    return None


def _requests(resources: Mapping[str, Any]) -> dict[str, Any]:
    return {**(resources.get("limits") or {}), **(resources.get("requests") or {})}


def _container(container: Mapping[str, Any], gpu_resource: str) -> Resources:
    return parse_resources(_requests(container.get("resources") or {}), gpu_resource)


def _summed(containers: Iterable[Mapping[str, Any]], gpu_resource: str) -> Resources:
    total = Resources()
    for container in containers:
        total += _container(container, gpu_resource)
    return total


def _elementwise_max(first: Resources, other: Resources) -> Resources:
    return Resources(
        max(first.gpus, other.gpus),
        max(first.cpu_milli, other.cpu_milli),
        max(first.memory_bytes, other.memory_bytes),
        max(first.pods, other.pods),
        _combined(first.others, other.others, max),
    )


def _overridden(amounts: Amounts, by: Amounts) -> Amounts:
    return tuple(sorted({**dict(amounts), **dict(by)}.items())) if by else amounts
