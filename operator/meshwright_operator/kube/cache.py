"""The cache of jobs, worker pods and nodes, with only the fields that the operator reads.

Watches and listings update it, and so do the API server's answers to the operator's own writes, so that the next
reconcile sees them. An older version never replaces a newer one, and a deleted object does not return
(`versioned_store`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

from meshwright.api.conditions import NO_LAYOUT, PLACED
from meshwright.api.labels import JOB_ANNOTATIONS
from meshwright.api.objects import KubeObject
from meshwright.devices.amounts import with_amounts
from meshwright_operator.kube.parsed_jobs import ParsedJobs
from meshwright_operator.kube.pod_index import JobKey, PodIndex, PodKey, RequestListener
from meshwright_operator.kube.pod_info import Pod
from meshwright_operator.kube.pod_requests import PodRequest, has_claims, read_pod_request
from meshwright_operator.kube.versioned_store import Listing, VersionedStore, parse_version

__all__ = ["Cache", "JobKey", "awaits_layout", "key_of", "pod_key_of", "trim_job", "trim_node"]

StoredPod = Pod | PodRequest | None
"""A worker pod; the requests of another pod with the job label; or None if that one requests nothing."""


class CapacityListener(RequestListener, Protocol):
    """Follows what pods request and which nodes exist, so that nobody has to collect it from all pods again."""

    def nodes_changed(self) -> None:
        """A node changed in a way that matters for placement."""


class Cache:
    """The operator's view of the cluster. Used from one event loop only."""

    def __init__(self) -> None:
        self._jobs: VersionedStore[JobKey, KubeObject] = VersionedStore(_namespace, final=True)
        self._nodes: VersionedStore[str, KubeObject] = VersionedStore(lambda _: "", final=True)
        self._pods: VersionedStore[PodKey, StoredPod] = VersionedStore(_namespace, final=False)
        self.jobs = self._jobs.values
        self.nodes = self._nodes.values
        self.parsed = ParsedJobs()
        """The specs and statuses of the jobs. Shared: nobody may change them."""
        self._index = PodIndex()
        self._awaiting: set[JobKey] = set()
        self._capacity_listener: CapacityListener | None = None
        self._devices: dict[str, dict[str, int]] = {}
        """Node -> devices behind Dynamic Resource Allocation, by resource."""
        self._own_resources: dict[str, KubeObject] = {}
        """Node -> its resources without these."""
        self.nodes_version = 0
        """Changes whenever a node changes in a way that matters for placement."""

    def set_capacity_listener(self, listener: CapacityListener) -> None:
        """Tell `listener` of every change from now on."""
        self._capacity_listener = self._index.listener = listener

    # Jobs.

    def put_job(self, obj: KubeObject) -> bool:
        """Store a job, unless a newer version is stored or it was deleted. Return whether it has another version."""
        key = key_of(obj)
        trimmed = trim_job(obj)
        old = self.jobs.get(key)
        if not self._jobs.put(key, _uid(obj), _version(obj), trimmed):
            return False
        (self._awaiting.add if awaits_layout(trimmed) else self._awaiting.discard)(key)
        return old is None or not _version(obj) or (_uid(old), _version(old)) != (_uid(obj), _version(obj))

    def remove_job(self, obj: KubeObject) -> None:
        """Remove a job that was deleted, unless another object with the same name has replaced it."""
        key = key_of(obj)
        if self._jobs.remove(key, _uid(obj), _version(obj)):
            self._awaiting.discard(key)
            self.parsed.forget(_uid(obj))

    def jobs_awaiting_layout(self) -> list[JobKey]:
        """The jobs of which no layout fitted the cluster's nodes at their last reconcile."""
        return list(self._awaiting)

    def begin_jobs_listing(self, namespace: str | None) -> Listing[JobKey, KubeObject]:
        """Begin to list the jobs of a namespace, or all."""
        return self._jobs.begin_listing(namespace)

    def finish_jobs_listing(self, listing: Listing[JobKey, KubeObject]) -> list[JobKey]:
        """Remove the jobs that the complete list does not contain, and return their keys."""
        removed = listing.finish()
        for key, job in removed:
            self._awaiting.discard(key)
            self.parsed.forget(_uid(job))
        return [key for key, _ in removed]

    # Pods.

    def put_pod(self, pod: Pod) -> bool:
        """Store a pod, unless a newer version is stored or it was deleted. Return whether it has changed."""
        key = PodKey(pod.namespace, pod.name)
        old = self._pods.values.get(key)
        if not self._pods.put(key, pod.uid, pod.version, pod):
            return False
        self._replace_pod(key, old, pod)
        return old != pod

    def has_this_pod(self, obj: KubeObject) -> bool:
        """Whether exactly this version of a worker pod is stored. Costs much less than reading it."""
        pod = self._pods.values.get(pod_key_of(obj))
        return isinstance(pod, Pod) and pod.version == _version(obj) > 0 and pod.uid == _uid(obj)

    def remove_pod(self, pod: Pod) -> None:
        """Remove a pod that was deleted, or that lost its label. Only a later version of it is stored again."""
        self._remove_pod(PodKey(pod.namespace, pod.name), pod.uid, pod.version)

    def put_unowned_pod(self, obj: KubeObject) -> JobKey | None:
        """Store a pod that has the job label but no job: it occupies its node all the same.

        Return the key of its job if it was a worker pod before.
        """
        key = pod_key_of(obj)
        old = self._pods.values.get(key)
        request = read_pod_request(obj, {})
        if not self._pods.put(key, _uid(obj), _version(obj), request):
            return None
        self._replace_pod(key, old, request)
        return JobKey(old.namespace, old.job) if isinstance(old, Pod) else None

    def remove_deleted_pod(self, obj: KubeObject) -> JobKey | None:
        """Remove a pod that was deleted in a form that is not a worker pod. Return the key of its job."""
        return self._remove_pod(pod_key_of(obj), _uid(obj), _version(obj))

    def begin_pods_listing(self, namespace: str | None) -> Listing[PodKey, StoredPod]:
        """Begin to list the labelled pods of a namespace, or all."""
        return self._pods.begin_listing(namespace)

    def finish_pods_listing(self, listing: Listing[PodKey, StoredPod]) -> None:
        """Remove the pods that the complete list does not contain."""
        for key, old in listing.finish():
            self._replace_pod(key, old, None)

    def pods(self, key: JobKey, uid: str) -> list[Pod]:
        """The pods that the job with this uid owns."""
        return [pod for pod in self._index.by_job.get(key, {}).values() if pod.owner == uid]

    def pod(self, key: JobKey, name: str) -> Pod | None:
        """The pod with this name."""
        return self._index.by_job.get(key, {}).get(name)

    def namesakes(self, key: JobKey, uid: str) -> list[Pod]:
        """The pods with the job's name that the job with this uid does not own."""
        return [pod for pod in self._index.by_job.get(key, {}).values() if pod.owner != uid]

    def count(self, key: JobKey) -> int:
        """The number of pods with the job's name."""
        return len(self._index.by_job.get(key, ()))

    def all_pods(self) -> Iterable[Pod]:
        """All worker pods."""
        return [pod for pods in self._index.by_job.values() for pod in pods.values()]

    def jobs_on(self, node: str) -> Collection[JobKey]:
        """The jobs that have worker pods on this node."""
        return self._index.jobs_on(node)

    # What pods request.

    def pod_requests(self) -> dict[str, PodRequest]:
        """The requests of all pods with the job label, by the pods' `NAMESPACE/NAME`."""
        return {str(key): request for key, request in self._index.requests.items()}

    # Nodes.

    def put_node(self, obj: KubeObject) -> bool:
        """Store a node, unless a newer version is stored. Return whether it changed in a way that matters for
        placement.
        """
        trimmed = trim_node(obj)
        name, uid = trimmed["metadata"]["name"], _uid(obj)
        own = trimmed["status"]["allocatable"]
        trimmed["status"]["allocatable"] = self._with_devices(name, own)
        old = self.nodes.get(name)
        # The same object is stored again, so that an identity check finds out that nothing has changed.
        value = old if old is not None and old == trimmed else trimmed
        replaced = self._nodes.uid_of(name) not in ("", uid)
        if not self._nodes.put(name, uid, _version(obj), value):
            return False
        self._own_resources[name] = own
        if value is old and not replaced:
            return False
        self._node_changed()
        return True

    def set_device_amounts(self, amounts: Mapping[str, Mapping[str, int]]) -> bool:
        """Add devices behind Dynamic Resource Allocation to the nodes' resources. Return whether nodes changed.

        Args:
            amounts: Node -> resource -> number of devices. A resource that the node itself offers is not replaced.
        """
        before, self._devices = self._devices, {name: dict(found) for name, found in amounts.items() if found}
        changed = [name for name in {*before, *self._devices} if before.get(name) != self._devices.get(name)]
        changed = [name for name in changed if name in self.nodes]
        for name in changed:
            node = self.nodes[name]
            allocatable = self._with_devices(name, self._own_resources.get(name, {}))
            self.nodes[name] = {**node, "status": {**node["status"], "allocatable": allocatable}}
        if changed:
            self._node_changed()
        return bool(changed)

    def _with_devices(self, name: str, allocatable: KubeObject) -> KubeObject:
        devices = self._devices.get(name)
        if not devices:
            return allocatable
        return with_amounts(allocatable, devices)

    def counts_claims_of(self, namespace: str, name: str, uid: str) -> bool:
        """Whether this is a worker pod that has not terminated, and whose request contains the devices it claims."""
        pod = self._pods.values.get(PodKey(namespace, name))
        return isinstance(pod, Pod) and pod.uid == uid and not pod.terminal and has_claims(pod.request_json)

    def remove_node(self, name: str, uid: str = "", version: int = 0) -> bool:
        """Remove a node, in any case if no uid is given. Return whether it was stored."""
        removed = self._nodes.remove(name, uid, version)
        if removed:
            self._node_changed()
        return removed

    def remove_deleted_node(self, obj: KubeObject) -> bool:
        """Remove a node that was deleted, unless another one with the same name has replaced it."""
        return self.remove_node(obj["metadata"]["name"], _uid(obj), _version(obj))

    def begin_nodes_listing(self) -> Listing[str, KubeObject]:
        """Begin to list all nodes."""
        return self._nodes.begin_listing()

    def finish_nodes_listing(self, listing: Listing[str, KubeObject]) -> list[str]:
        """Remove the nodes that the complete list does not contain, and return their names."""
        removed = [name for name, _ in listing.finish()]
        if removed:
            self._node_changed()
        return removed

    def _node_changed(self) -> None:
        self.nodes_version += 1
        if self._capacity_listener is not None:
            self._capacity_listener.nodes_changed()

    def _remove_pod(self, key: PodKey, uid: str, version: int) -> JobKey | None:
        old = self._pods.values.get(key)
        if not self._pods.remove(key, uid, version):
            return None
        return self._replace_pod(key, old, None)

    def _replace_pod(self, key: PodKey, old: StoredPod, new: StoredPod) -> JobKey | None:
        """Update the indexes. Return the key of the old worker pod's job."""
        if isinstance(old, Pod) or isinstance(new, Pod):
            self._index.replace(key, old if isinstance(old, Pod) else None, new if isinstance(new, Pod) else None)
        if not isinstance(new, Pod):
            self._index.set_request(key, new)
        return JobKey(old.namespace, old.job) if isinstance(old, Pod) else None


def key_of(obj: Mapping[str, Any]) -> JobKey:
    """The key of a job object."""
    return JobKey(obj["metadata"].get("namespace", ""), obj["metadata"]["name"])


def pod_key_of(obj: Mapping[str, Any]) -> PodKey:
    """The key of a raw pod object."""
    return PodKey(str(obj["metadata"].get("namespace", "")), str(obj["metadata"]["name"]))


def awaits_layout(job: Mapping[str, Any]) -> bool:
    """Whether no layout of the job fitted the cluster's nodes at its last reconcile."""
    status = job.get("status")
    conditions = status.get("conditions") if isinstance(status, dict) else None
    for condition in conditions if isinstance(conditions, list) else ():
        if isinstance(condition, dict) and condition.get("type") == PLACED:
            return condition.get("status") == "False" and condition.get("reason") == NO_LAYOUT
    return False


def trim_job(obj: KubeObject) -> KubeObject:
    """A job without the metadata that the operator does not read: of its annotations, those of others."""
    dropped = ("managedFields", "annotations")
    metadata = {k: v for k, v in obj["metadata"].items() if k not in dropped}
    annotations = obj["metadata"].get("annotations") or {}
    own = {k: v for k, v in annotations.items() if k in JOB_ANNOTATIONS} if isinstance(annotations, dict) else {}
    return {**obj, "metadata": {**metadata, "annotations": own} if own else metadata}


def trim_node(obj: KubeObject) -> KubeObject:
    """The fields of a node that matter for placement and recovery, without heartbeat times, which always change."""
    metadata, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    conditions = [c for c in status.get("conditions") or () if isinstance(c, dict) and c.get("type") == "Ready"]
    return {
        "metadata": {k: metadata[k] for k in ("name", "labels", "deletionTimestamp") if k in metadata},
        "spec": {k: spec[k] for k in ("unschedulable", "taints") if k in spec},
        "status": {
            "allocatable": status.get("allocatable") or {},
            "conditions": [{"type": "Ready", "status": c.get("status")} for c in conditions],
        },
    }


def _uid(obj: Mapping[str, Any]) -> str:
    return str(obj["metadata"].get("uid", ""))


def _version(obj: Mapping[str, Any]) -> int:
    return parse_version(obj["metadata"].get("resourceVersion", ""))


def _namespace(key: JobKey | PodKey) -> str:
    return key.namespace
