"""Worker pods by job and by node, and what all labelled pods request, updated with every change of a pod."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from typing import NamedTuple, Protocol

from meshwright_operator.kube.pod_info import Pod
from meshwright_operator.kube.pod_requests import PodRequest


class JobKey(NamedTuple):
    """Namespace and name of a job."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class PodKey(NamedTuple):
    """Namespace and name of a pod."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class RequestListener(Protocol):
    """Follows what pods request."""

    def pod_changed(self, pod: str, request: PodRequest | None) -> None:
        """The pod `NAMESPACE/NAME` requests this now; None if it requests nothing any more."""


class PodIndex:
    """Indexes of pods. Every change costs the same, however many pods there are."""

    def __init__(self) -> None:
        self.by_job: dict[JobKey, dict[str, Pod]] = {}
        """Job -> its worker pods by name."""
        self.keys_by_uid: dict[str, PodKey] = {}
        self.requests: dict[PodKey, PodRequest] = {}
        """The requests of pods that have a node and have not terminated."""
        self.listener: RequestListener | None = None
        """Told of every change of a request."""
        self._jobs_by_node: dict[str, Counter[JobKey]] = defaultdict(Counter)

    def replace(self, key: PodKey, old: Pod | None, new: Pod | None) -> None:
        """Replace a worker pod with another version, or with None."""
        if old is not None and (new is None or (old.job, old.node, old.uid) != (new.job, new.node, new.uid)):
            self._remove(old)
        if new is not None:
            if old is None or (old.job, old.node, old.uid) != (new.job, new.node, new.uid):
                self._add(key, new)
            self.by_job.setdefault(JobKey(new.namespace, new.job), {})[new.name] = new
        self.set_request(key, request_of(new) if new is not None else None)

    def set_request(self, key: PodKey, new: PodRequest | None) -> None:
        """Set what a pod requests, or that it requests nothing."""
        old = self.requests.get(key)
        if old == new:
            return
        if new is None:
            del self.requests[key]
        else:
            self.requests[key] = new
        if self.listener is not None:
            self.listener.pod_changed(str(key), new)

    def jobs_on(self, node: str) -> Collection[JobKey]:
        """The jobs that have worker pods on this node."""
        return list(self._jobs_by_node[node]) if node in self._jobs_by_node else ()

    def _add(self, key: PodKey, pod: Pod) -> None:
        self.keys_by_uid[pod.uid] = key
        if pod.node:
            self._jobs_by_node[pod.node][JobKey(pod.namespace, pod.job)] += 1

    def _remove(self, pod: Pod) -> None:
        job = JobKey(pod.namespace, pod.job)
        self.keys_by_uid.pop(pod.uid, None)
        pods = self.by_job[job]
        del pods[pod.name]
        if not pods:
            del self.by_job[job]
        if pod.node:
            counts = self._jobs_by_node[pod.node]
            counts[job] -= 1
            if not counts[job]:
                del counts[job]
            if not counts:
                del self._jobs_by_node[pod.node]


def request_of(pod: Pod) -> PodRequest | None:
    """What a worker pod requests; None if it has no node or has terminated.

    A pod that no job owns must be bound: see `occupied_node`.
    """
    if not pod.node or pod.terminal or not (pod.bound or pod.of_job):
        return None
    return PodRequest(pod.name, pod.namespace, pod.node, pod.request_json, pod.job, pod.owner)
