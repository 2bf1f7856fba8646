"""What the watches saw last: jobs, worker pods by job, nodes by name. Slim, and never the truth.

Objects that the operator itself wrote are put here from the API server's answer, so that the next reconcile does not
act on a past it made. An older version never replaces a newer one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from meshwright_operator.claims import Claim, read_claim
from meshwright_operator.pods import Pod

Object = dict[str, Any]


class JobKey(NamedTuple):
    """A job by name."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Cache:
    """The operator's view of the cluster. Used from one event loop only."""

    def __init__(self) -> None:
        self.jobs: dict[JobKey, Object] = {}
        self.nodes: dict[str, Object] = {}
        self._pods: dict[JobKey, dict[str, Pod]] = defaultdict(dict)
        self._strangers: dict[str, Claim] = {}
        self._gone: dict[str, int] = {}
        self.nodes_version = 0
        """Another one whenever anything that placement looks at is different."""

    def put_job(self, obj: Object) -> None:
        """Takes a job unless a newer version of it is here."""
        key = key_of(obj)
        old = self.jobs.get(key)
        if old is None or _uid(old) != _uid(obj) or _version(old) <= _version(obj):
            self.jobs[key] = slim_job(obj)

    def remove_job(self, obj: Object) -> None:
        """Drops a job, unless another object of the same name took its place."""
        key = key_of(obj)
        if (old := self.jobs.get(key)) is not None and _uid(old) == _uid(obj):
            del self.jobs[key]

    def put_pod(self, pod: Pod) -> bool:
        """Takes a pod unless a newer version of it is here, or it was seen to be gone; whether that is news."""
        key = JobKey(pod.namespace, pod.job)
        old = self._pods.get(key, {}).get(pod.name)
        if pod.version <= self._gone.get(pod.uid, -1):
            return False
        if old is not None and old.uid == pod.uid and old.version > pod.version:
            return False
        self._pods[key][pod.name] = pod
        self._strangers.pop(pod.uid, None)
        return old != pod

    def remove_pod(self, pod: Pod) -> None:
        """Drops a pod, which also lost its label perhaps: only a later state of it than this brings it back."""
        key = JobKey(pod.namespace, pod.job)
        pods = self._pods.get(key, {})
        if (old := pods.get(pod.name)) is not None and old.uid == pod.uid:
            del pods[pod.name]
        if not pods:
            self._pods.pop(key, None)
        self._gone[pod.uid] = pod.version
        while len(self._gone) > 4096:
            del self._gone[next(iter(self._gone))]

    def put_stranger(self, obj: Object) -> None:
        """Takes a pod that carries the job label and is no job's: it holds its node all the same."""
        claim = read_claim(obj, {})
        if claim is not None:
            self._strangers[_uid(obj)] = claim
        else:
            self._strangers.pop(_uid(obj), None)

    def remove_stranger(self, uid: str) -> None:
        """Drops such a pod."""
        self._strangers.pop(uid, None)

    def strangers(self, namespace: str | None) -> set[str]:
        """The uids of those in a namespace; None: in all."""
        return {uid for uid, claim in self._strangers.items() if namespace in (None, claim.namespace)}

    def claims(self) -> list[Claim]:
        """What every pod with the job label holds."""
        own = [
            Claim(pod.name, pod.namespace, pod.node, pod.ask, pod.job, pod.owner)
            for pods in self._pods.values()
            for pod in pods.values()
            if pod.node and not pod.terminal
        ]
        return [*own, *self._strangers.values()]

    def lose_sight(self, uid: str) -> JobKey | None:
        """Drops a pod that still exists but lost the job label, so that no watch shows it; the key of its job."""
        for key, pods in self._pods.items():
            for pod in pods.values():
                if pod.uid == uid:
                    del pods[pod.name]
                    if not pods:
                        del self._pods[key]
                    return key
        return None

    def pods(self, key: JobKey, uid: str) -> list[Pod]:
        """The job's own pods, by its uid."""
        return [pod for pod in self._pods.get(key, {}).values() if pod.owner == uid]

    def count(self, key: JobKey) -> int:
        """How many pods carry the job's name."""
        return len(self._pods.get(key, ()))

    def all_pods(self) -> Iterable[Pod]:
        """Every pod with the job label."""
        return [pod for pods in self._pods.values() for pod in pods.values()]

    def put_node(self, obj: Object) -> bool:
        """Takes a node; whether anything that placement looks at is different now."""
        slim = slim_node(obj)
        name = slim["metadata"]["name"]
        changed = self.nodes.get(name) != slim
        self.nodes[name] = slim
        self.nodes_version += changed
        return changed

    def remove_node(self, name: str) -> bool:
        """Drops a node; whether it was here."""
        gone = self.nodes.pop(name, None) is not None
        self.nodes_version += gone
        return gone


def key_of(obj: Mapping[str, Any]) -> JobKey:
    """The key of a job object."""
    return JobKey(obj["metadata"].get("namespace", ""), obj["metadata"]["name"])


def slim_job(obj: Object) -> Object:
    """A job without what nobody here reads."""
    dropped = ("managedFields", "annotations")
    return {**obj, "metadata": {k: v for k, v in obj["metadata"].items() if k not in dropped}}


def slim_node(obj: Object) -> Object:
    """What placement and recovery look at; no heartbeat times, so that a node that is just alive does not differ."""
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
