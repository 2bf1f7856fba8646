"""The cache of jobs, worker pods and nodes, with only the fields that the operator reads.

Watches and listings update it, and so do the API server's answers to the operator's own writes, so that the next
reconcile sees them. An older version never replaces a newer one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from meshwright.api.objects import KubeObject
from meshwright_operator.kube.pod_info import Pod
from meshwright_operator.kube.pod_requests import PodRequest, read_pod_request


class JobKey(NamedTuple):
    """Namespace and name of a job."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class CapacityListener(Protocol):
    """Follows what pods request and which nodes exist, so that nobody has to collect it from all pods again."""

    def pod_changed(self, uid: str, request: PodRequest | None) -> None:
        """A pod requests this now; None if it requests nothing any more."""

    def nodes_changed(self) -> None:
        """A node changed in a way that matters for placement."""


class Cache:
    """The operator's view of the cluster. Used from one event loop only."""

    def __init__(self) -> None:
        self.jobs: dict[JobKey, KubeObject] = {}
        self.nodes: dict[str, KubeObject] = {}
        self._pods: dict[JobKey, dict[str, Pod]] = defaultdict(dict)
        self._unowned_pods: dict[str, PodRequest] = {}
        self._deleted_versions: dict[str, int] = {}
        self.nodes_version = 0
        """Changes whenever a node changes in a way that matters for placement."""
        self.capacity_listener: CapacityListener | None = None

    def put_job(self, obj: KubeObject) -> None:
        """Store a job, unless a newer version is stored."""
        key = key_of(obj)
        old = self.jobs.get(key)
        if old is None or _uid(old) != _uid(obj) or _version(old) <= _version(obj):
            self.jobs[key] = trim_job(obj)

    def remove_job(self, obj: KubeObject) -> None:
        """Remove a job, unless another object with the same name has replaced it."""
        key = key_of(obj)
        if (old := self.jobs.get(key)) is not None and _uid(old) == _uid(obj):
            del self.jobs[key]

    def put_pod(self, pod: Pod) -> bool:
        """Store a pod, unless a newer version is stored or it was deleted. Return whether it has changed."""
        key = JobKey(pod.namespace, pod.job)
        old = self._pods.get(key, {}).get(pod.name)
        if pod.version <= self._deleted_versions.get(pod.uid, -1):
            return False
        if old is not None and old.uid == pod.uid and old.version > pod.version:
            return False
        if old is not None and old.uid != pod.uid:
            self._note_request(old.uid, None)
        self._pods[key][pod.name] = pod
        self._unowned_pods.pop(pod.uid, None)
        self._note_request(pod.uid, _request_of(pod))
        return old != pod

    def remove_pod(self, pod: Pod) -> None:
        """Remove a pod that was deleted, or that lost its label. Only a later version of it is stored again."""
        key = JobKey(pod.namespace, pod.job)
        pods = self._pods.get(key, {})
        if (old := pods.get(pod.name)) is not None and old.uid == pod.uid:
            del pods[pod.name]
        if not pods:
            self._pods.pop(key, None)
        self._note_request(pod.uid, None)
        self._deleted_versions[pod.uid] = pod.version
        while len(self._deleted_versions) > 4096:
            del self._deleted_versions[next(iter(self._deleted_versions))]

    def put_unowned_pod(self, obj: KubeObject) -> None:
        """Store a pod that has the job label but no job: it occupies its node all the same."""
        pod_request = read_pod_request(obj, {})
        if pod_request is not None:
            self._unowned_pods[_uid(obj)] = pod_request
        else:
            self._unowned_pods.pop(_uid(obj), None)
        self._note_request(_uid(obj), pod_request)

    def remove_unowned_pod(self, uid: str) -> None:
        """Remove such a pod."""
        self._unowned_pods.pop(uid, None)
        self._note_request(uid, None)

    def unowned_pods(self, namespace: str | None) -> set[str]:
        """The uids of such pods in a namespace, or in all if it is None."""
        return {uid for uid, pod_request in self._unowned_pods.items() if namespace in (None, pod_request.namespace)}

    def pod_requests(self) -> dict[str, PodRequest]:
        """The requests of all pods with the job label, by the pods' uids."""
        own = {
            pod.uid: request
            for pods in self._pods.values()
            for pod in pods.values()
            if (request := _request_of(pod)) is not None
        }
        return own | self._unowned_pods

    def remove_unlabeled_pod(self, uid: str) -> JobKey | None:
        """Remove a pod that lost the job label, so that the watch no longer selects it. Return its job's key."""
        for key, pods in self._pods.items():
            for pod in pods.values():
                if pod.uid == uid:
                    del pods[pod.name]
                    self._note_request(uid, None)
                    if not pods:
                        del self._pods[key]
                    return key
        return None

    def pods(self, key: JobKey, uid: str) -> list[Pod]:
        """The pods that the job with this uid owns."""
        return [pod for pod in self._pods.get(key, {}).values() if pod.owner == uid]

    def pod(self, key: JobKey, name: str) -> Pod | None:
        """The pod with this name."""
        return self._pods.get(key, {}).get(name)

    def namesakes(self, key: JobKey, uid: str) -> list[Pod]:
        """The pods with the job's name that the job with this uid does not own."""
        return [pod for pod in self._pods.get(key, {}).values() if pod.owner != uid]

    def count(self, key: JobKey) -> int:
        """The number of pods with the job's name."""
        return len(self._pods.get(key, ()))

    def all_pods(self) -> Iterable[Pod]:
        """All pods with the job label."""
        return [pod for pods in self._pods.values() for pod in pods.values()]

    def put_node(self, obj: KubeObject) -> bool:
        """Store a node. Return whether it changed in a way that matters for placement."""
        trimmed = trim_node(obj)
        name = trimmed["metadata"]["name"]
        changed = self.nodes.get(name) != trimmed
        self.nodes[name] = trimmed
        self.nodes_version += changed
        if changed and self.capacity_listener is not None:
            self.capacity_listener.nodes_changed()
        return changed

    def remove_node(self, name: str) -> bool:
        """Remove a node. Return whether it was stored."""
        gone = self.nodes.pop(name, None) is not None
        self.nodes_version += gone
        if gone and self.capacity_listener is not None:
            self.capacity_listener.nodes_changed()
        return gone

    def _note_request(self, uid: str, request: PodRequest | None) -> None:
        if self.capacity_listener is not None:
            self.capacity_listener.pod_changed(uid, request)


def _request_of(pod: Pod) -> PodRequest | None:
    """What the pod requests on its node; None if it has no node, or requests nothing any more."""
    if not pod.node or pod.terminal:
        return None
    return PodRequest(pod.name, pod.namespace, pod.node, pod.request_json, pod.job, pod.owner)


def key_of(obj: Mapping[str, Any]) -> JobKey:
    """The key of a job object."""
    return JobKey(obj["metadata"].get("namespace", ""), obj["metadata"]["name"])


def trim_job(obj: KubeObject) -> KubeObject:
    """A job without the metadata that the operator does not read."""
    dropped = ("managedFields", "annotations")
    return {**obj, "metadata": {k: v for k, v in obj["metadata"].items() if k not in dropped}}


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
    text = str(obj["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdigit() else 0
