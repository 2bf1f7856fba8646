"""The inventory of one job: nodes with free GPUs, and their location in the fabric.

It is built from raw Kubernetes objects. A malformed object is left out and affects no other object.
"""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.api.labels import GPU_RESOURCE, LABEL_JOB_UID
from meshwright.api.workers import Toleration, covers_taint
from meshwright.planner.cluster.pod_resources import (
    HOSTNAME_LABEL,
    Resources,
    is_terminal,
    occupied_node,
    parse_resources,
    pod_request,
)
from meshwright.planner.cost.accelerators import gpu_memory_bytes
from meshwright.planner.topology import DEFAULT_LEVELS, Level, Location, as_tree, locate
from meshwright.planner.topology.levels import CLIQUE, DOMAIN, RACK
from meshwright.planner.topology.location import needs_channel
from meshwright.planner.topology.site import DEFAULT_SITE, SiteFabric

_MIB = 1 << 20

MALFORMED = (AttributeError, KeyError, TypeError, ValueError, OverflowError)
"""The errors of reading an object with the wrong shape."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node."""

    name: str
    place: Location
    capacity: Resources
    """The node's allocatable resources."""
    free: Resources
    """The resources that no pod uses."""
    gpu_memory_bytes: int | None = None
    """Bytes of memory of one GPU. None if neither label nor catalog has it."""
    gpu_product: str = ""
    """Value of the label `nvidia.com/gpu.product`, or empty."""
    unusable: str = ""
    """Why the node is excluded, such as `cordoned`. Empty for a usable node."""
    separate_host: bool = False
    """Whether it is an NVLink domain of its own because the job's pods have no IMEX channel."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """Every node with a valid object, by name, and warnings about the cluster."""

    nodes: Mapping[str, Node] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    levels: tuple[str, ...] = (DOMAIN, RACK)
    """Names of the fabric levels of the nodes' locations, closest first."""
    site: SiteFabric = field(default_factory=lambda: DEFAULT_SITE)
    """What the administrator states about the fabric."""
    pods_joined: bool = True
    """Whether a claim joins the job's pods, so that NVLink connects those of one host. See `nvlink_domains`."""

    @property
    def usable(self) -> list[Node]:
        """Nodes that may get workers, sorted by name."""
        return [self.nodes[name] for name in sorted(self.nodes) if not self.nodes[name].unusable]

    @property
    def unusable(self) -> dict[str, str]:
        """Node with GPUs -> why it may not get workers."""
        return {n.name: n.unusable for n in self.nodes.values() if n.unusable and n.capacity.gpus}

    @property
    def excluded(self) -> dict[str, str]:
        """The same for messages: if no node has GPUs of the resource, all nodes, since its name may be wrong."""
        if any(node.capacity.gpus for node in self.nodes.values()):
            return self.unusable
        return {node.name: node.unusable for node in self.nodes.values() if node.unusable}

    @classmethod
    def from_objects(
        cls,
        nodes: Iterable[Mapping[str, Any]],
        pods: Iterable[Mapping[str, Any]],
        *,
        gpu_resource: str = GPU_RESOURCE,
        node_selector: Mapping[str, str] | None = None,
        tolerations: Sequence[Toleration] = (),
        without_job: str | None = None,
        levels: Sequence[Level] | None = None,
        site: SiteFabric = DEFAULT_SITE,
        channel: bool = True,
        pods_joined: bool | None = None,
    ) -> Inventory:
        """The inventory for one job.

        Args:
            nodes: raw Node objects.
            pods: raw Pod objects of all namespaces. Finished pods do not count.
            gpu_resource: extended resource of the GPUs.
            node_selector: labels that a node must have.
            tolerations: taints that the job tolerates.
            without_job: uid of a job whose own pods are not counted, because `place` gets them as `keep`.
            levels: the fabric levels and the label keys that name them, closest first. Default: those of `site`.
            site: what the administrator states about the fabric.
            channel: whether the job's pods have an IMEX channel, so that NVLink joins the nodes of a clique.
            pods_joined: whether a claim joins the pods of one host. Default: whether they have a channel.
        """
        levels = site.fabric_levels() if levels is None else levels
        warnings: list[str] = []
        found: dict[str, Node] = {}
        node_by_hostname: dict[str, str] = {}
        selector = node_selector or {}
        for read, unusable in _read_nodes(
            nodes, gpu_resource, levels, selector, tolerations, warnings, channel=channel
        ):
            found[read.node.name] = replace(read.node, unusable=unusable)
            if read.hostname is not None:
                node_by_hostname[read.hostname] = read.node.name
        used = _usage_by_node(pods, gpu_resource, without_job, node_by_hostname, warnings)
        places, conflicts = as_tree({name: node.place for name, node in found.items() if node.capacity.gpus}, levels)
        counted_nodes = {
            name: replace(node, place=places.get(name, node.place), free=node.capacity - used.get(name, Resources()))
            for name, node in found.items()
        }
        names = next(iter(places.values())).levels if places else (DOMAIN, RACK)
        more = (*conflicts, *_overcommit_warnings(counted_nodes), *_missing_label_warnings(counted_nodes, names))
        joined = channel if pods_joined is None else pods_joined
        return cls(counted_nodes, (*warnings, *more), names, site, joined)

    def holding(self, used: Mapping[str, Resources], warnings: Sequence[str] = ()) -> Inventory:
        """The same nodes with further resources in use (node -> amount).

        `warnings` are about the pods that use them.
        """
        nodes = dict(self.nodes)
        for name, amount in used.items():
            if name in nodes:
                nodes[name] = replace(nodes[name], free=nodes[name].free - amount)
        return replace(self, nodes=nodes, warnings=(*self.warnings, *warnings, *_overcommit_warnings(nodes)))

    def only(self, gpu_product: str) -> Inventory:
        """The inventory of the nodes with these GPUs."""
        nodes = {name: node for name, node in self.nodes.items() if node.gpu_product == gpu_product}
        return replace(self, nodes=nodes)

    def with_workers(self, gpus_per_worker: int) -> list[Node]:
        """The usable nodes that have the GPUs of at least one worker; all usable nodes if no node has."""
        usable = self.usable
        return [node for node in usable if node.capacity.gpus >= gpus_per_worker] or usable

    def emptied(self, names: Iterable[str] | None = None) -> Inventory:
        """The inventory without pods on these nodes; by default on all."""
        emptied = self.nodes if names is None else {name: self.nodes[name] for name in names}
        free = {name: replace(node, free=node.capacity) for name, node in emptied.items()}
        return replace(self, nodes={**self.nodes, **free})


@dataclass(frozen=True, slots=True)
class ReadNode:
    """A node's object as every job with the same GPU resource reads it."""

    node: Node
    """Without what depends on a job's selector and tolerations."""
    labels: Mapping[str, str]
    taints: Sequence[Mapping[str, Any]]
    shared_gpu: str
    """Why its GPUs are not entire GPUs, or empty."""
    hostname: str | None
    warning: str

    @classmethod
    def of(
        cls,
        obj: Mapping[str, Any],
        gpu_resource: str,
        levels: Sequence[Level] = DEFAULT_LEVELS,
        *,
        channel: bool = True,
    ) -> ReadNode:
        """Read a raw Node object.

        Raises:
            ValueError: the object is malformed. So do the other errors of `MALFORMED`.
        """
        metadata, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
        name, labels = metadata["name"], metadata.get("labels") or {}
        if not isinstance(name, str) or not name:
            raise ValueError("it has no name")
        capacity = parse_resources(status.get("allocatable") or {}, gpu_resource)
        if min(capacity.gpus, capacity.cpu_milli, capacity.memory_bytes, capacity.pods) < 0:
            raise ValueError("it offers less than nothing")
        hostname = labels.get(HOSTNAME_LABEL)
        product = str(labels.get("nvidia.com/gpu.product") or "")
        memory_label, warning = labels.get("nvidia.com/gpu.memory"), ""
        if capacity.gpus and memory_label is not None and not _is_memory_label(str(memory_label)):
            warning = (
                f"node {name}: label nvidia.com/gpu.memory is {str(memory_label)[:32]!r}, not a number of MiB above "
                "0: it is "
                "ignored"
            )
        node = Node(
            name=name,
            place=locate(name, labels, levels, channel=channel),
            capacity=capacity,
            free=capacity,
            gpu_memory_bytes=_gpu_memory(labels, product),
            gpu_product=product,
            unusable=_why_unusable(metadata, spec, status, "" if capacity.gpus > 0 else gpu_resource),
            separate_host=not channel and needs_channel(labels),
        )
        shared_gpu = _shared_gpu(labels, product)
        taints = [taint for taint in spec.get("taints") or () if taint.get("effect") in ("NoSchedule", "NoExecute")]
        return cls(node, labels, taints, shared_gpu, hostname if isinstance(hostname, str) else None, warning)

    def unusable_for(self, selector: Mapping[str, str], tolerations: Sequence[Toleration]) -> str:
        """Why a job with this selector and these tolerations may not use the node. Empty if it may."""
        return (
            self.node.unusable
            or _selector_mismatch(self.labels, selector)
            or _untolerated_taint(self.taints, tolerations)
            or self.shared_gpu
        )


def _read_nodes(
    nodes: Iterable[Mapping[str, Any]],
    gpu_resource: str,
    levels: Sequence[Level],
    selector: Mapping[str, str],
    tolerations: Sequence[Toleration],
    warnings: list[str],
    *,
    channel: bool,
) -> Iterator[tuple[ReadNode, str]]:
    """Each node, and why the job may not use it. Adds warnings about malformed objects and labels to `warnings`."""
    for obj in nodes:
        try:
            read = ReadNode.of(obj, gpu_resource, levels, channel=channel)
            unusable = read.unusable_for(selector, tolerations)
        except MALFORMED as error:
            warnings.append(malformed_node_warning(obj, error))
            continue
        if read.warning:
            warnings.append(read.warning)
        yield read, unusable


def malformed_node_warning(obj: object, error: Exception) -> str:
    """The warning about a node that is left out."""
    return f"node {_name_of(obj)} was left out: its object is malformed ({error})"


def _name_of(obj: object) -> str:
    metadata = obj.get("metadata") if isinstance(obj, Mapping) else None
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    return name if isinstance(name, str) and name else "(without a name)"


def _why_unusable(
    metadata: Mapping[str, Any], spec: Mapping[str, Any], status: Mapping[str, Any], missing_resource: str
) -> str:
    if metadata.get("deletionTimestamp"):
        return "being deleted"
    if spec.get("unschedulable"):
        return "cordoned"
    conditions = status.get("conditions") or ()
    if not any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions):
        return "not ready"
    if not missing_resource:
        return ""
    names = map(str, status.get("allocatable") or {})
    extended = [name for name in names if "/" in name and name != missing_resource]
    close = difflib.get_close_matches(missing_resource, extended, 1, cutoff=0.5)
    return f"no {missing_resource}, but {close[0]}" if close else f"no {missing_resource}"


def _selector_mismatch(labels: Mapping[str, str], selector: Mapping[str, str]) -> str:
    for key, value in sorted(selector.items()):
        if labels.get(key) != value:
            return _label_mismatch(labels, key, value)
    return ""


def _label_mismatch(labels: Mapping[str, str], key: str, value: str) -> str:
    """Which label the node has instead: the value of the same key, or the most similar key."""
    if key in labels:
        return f"label {key} is {labels[key]}, not {value}"
    close = difflib.get_close_matches(key, [str(name) for name in labels], 1, cutoff=0.8)
    return f"no label {key}, but {close[0]}" if close else f"no label {key}"


def _untolerated_taint(taints: Iterable[Mapping[str, Any]], tolerations: Sequence[Toleration]) -> str:
    for taint in taints:
        if not any(_tolerates(t, taint) for t in tolerations):
            return f"taint {taint.get('key')} is not tolerated"
    return ""


def _tolerates(toleration: Toleration, taint: Mapping[str, Any]) -> bool:
    return covers_taint(toleration.key, toleration.operator, toleration.value, toleration.effect, taint)


def _shared_gpu(labels: Mapping[str, str], product: str) -> str:
    if "-MIG-" in product or "-SHARED" in product:
        return f"its GPUs are slices ({product})"
    replicas = str(labels.get("nvidia.com/gpu.replicas") or "1")
    return f"its GPUs are shared by {replicas} pods" if replicas.isdigit() and int(replicas) > 1 else ""


def _gpu_memory(labels: Mapping[str, str], product: str) -> int | None:
    memory_label = str(labels.get("nvidia.com/gpu.memory") or "")
    return int(memory_label) * _MIB if _is_memory_label(memory_label) else gpu_memory_bytes(product)


def _is_memory_label(memory_label: str) -> bool:
    return (
        memory_label.isascii()
        and memory_label.isdecimal()
        and len(memory_label) < 11
        and 0 < int(memory_label) < 1 << 31
    )


def _usage_by_node(
    pods: Iterable[Mapping[str, Any]],
    gpu_resource: str,
    without_job: str | None,
    node_by_hostname: Mapping[str, str],
    warnings: list[str],
) -> dict[str, Resources]:
    """Node -> resources in use by pods."""
    used: defaultdict[str, Resources] = defaultdict(Resources)
    for pod in pods:
        try:
            if is_terminal(pod) or (without_job and _job_uid(pod) == without_job):
                continue
            node = occupied_node(pod, node_by_hostname)
            if node is not None:
                used[node] += pod_request(pod, gpu_resource)
        except MALFORMED as error:
            warnings.append(f"pod {_name_of(pod)} was not counted: its object is malformed ({error})")
    return used


def _job_uid(pod: Mapping[str, Any]) -> str | None:
    return ((pod.get("metadata") or {}).get("labels") or {}).get(LABEL_JOB_UID)


def _missing_label_warnings(nodes: Mapping[str, Node], levels: Sequence[str]) -> list[str]:
    """A warning for each level whose label is missing on some nodes."""
    return missing_label_warnings(Counter(node.place for node in nodes.values() if not node.unusable), levels)


def missing_label_warnings(usable: Mapping[Location, int], levels: Sequence[str]) -> list[str]:
    """A warning for each level whose label is missing on some usable nodes. `usable` counts them by location."""
    found: list[str] = []
    total = sum(usable.values())
    for below, level in zip(levels, levels[1:], strict=False):
        # A location named after the level below has no label (see `locate`).
        unlabeled_nodes = sum(count for place, count in usable.items() if "/" in place.at(level))
        if unlabeled_nodes:
            inner = "NVLink domain" if below == DOMAIN else below
            one = unlabeled_nodes == 1
            has, those = ("has", f"its {inner}") if one else ("have", f"each of their {inner}s")
            found.append(f"{unlabeled_nodes} of {total} GPU nodes {has} no {level} label: {those} counts as a {level}")
    return found


def separate_hosts_sentence(hosts: int) -> str:
    """Why the nodes of cliques count as separate NVLink domains."""
    nodes = "1 node has" if hosts == 1 else f"{hosts} nodes have"
    return (
        f"each host is its own NVLink domain: {nodes} the label {CLIQUE}, but NVLink between hosts needs an IMEX "
        "channel in every pod; `topology.multiNodeNVLink: true` gives the job one"
    )


def _overcommit_warnings(nodes: Mapping[str, Node]) -> list[str]:
    """A warning about nodes whose pods request more GPUs than they have."""
    overcommitted = sorted(node.name for node in nodes.values() if node.free.gpus < 0)
    if overcommitted:
        more = f" and {len(overcommitted) - 3} more" if len(overcommitted) > 3 else ""
        return [
            f"pods use more GPUs than these nodes have: {', '.join(overcommitted[:3])}{more}; nothing is placed there"
        ]
    return []
