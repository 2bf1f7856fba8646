"""The Workload of Kueue for a job: its queue, priority, and one pod set with the number and the requests of its pods.

Nothing in it depends on where the pods run. A digest of it is in an annotation, because the API server adds defaults to
what is stored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.api import labels
from meshwright.api.objects import KubeObject
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.cluster.pod_resources import worker_requests
from meshwright.profiles.merged import requesting_containers
from meshwright.profiles.profile import Profile
from meshwright_operator.manifests.owned_objects import job_labels, owner_reference

GROUP = "kueue.x-k8s.io"
VERSIONS = ("v1beta2", "v1beta1")
"""The versions that the operator speaks, the preferred one first."""
POD_SET = "workers"
DIGEST = f"{labels.GROUP}/pod-sets"
"""Annotation: digest of what quota is asked for."""
GPUS_PER_REPLICA = f"{labels.GROUP}/gpus-per-replica"
"""Annotation: how many GPUs one replica has, to know how many replicas a partial admission is enough for."""
SUSPENDED = f"{labels.GROUP}/suspended"
"""Annotation: the operator deactivated the Workload, because the job is suspended. Only then it activates it again."""
JOB_UID = f"{GROUP}/job-uid"
"""Label by which Kueue's tools find the Workload of a job."""
REQUIRED, PREFERRED, UNCONSTRAINED = (
    f"{GROUP}/podset-{kind}-topology" for kind in ("required", "preferred", "unconstrained")
)
"""Annotations of pods that ask for a topology."""
NAME_LENGTH = 63
DIGITS = 16


@dataclass(frozen=True, slots=True)
class Demand:
    """What a job asks a queue for."""

    queue: str
    workers: int
    least: int | None
    """The smallest number of workers that an elastic job runs with. None for others."""
    gpus_per_replica: int
    spec: ParallelTrainingJobSpec
    max_seconds: int | None = None
    profile: Profile | None = None
    """The profile of the pods, whose containers request something too."""

    @property
    def pod_set(self) -> KubeObject:
        """The pod set, as the API server gets it."""
        least = {"minCount": self.least} if self.least is not None and self.least < self.workers else {}
        topology = _topology(self.spec.workers.annotations)
        return {
            "name": POD_SET,
            "count": self.workers,
            **least,
            **({"topologyRequest": topology} if topology else {}),
            "template": _template(self.spec, self.profile),
        }

    @property
    def digest(self) -> str:
        """A digest of everything for which quota is asked."""
        content = json.dumps([self.queue, self.max_seconds, self.pod_set], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()[:DIGITS]

    @property
    def shape(self) -> str:
        """The same without the number of workers: a smaller number with the same shape needs no other quota."""
        pod_set = {name: value for name, value in self.pod_set.items() if name not in ("count", "minCount")}
        content = json.dumps([self.queue, self.max_seconds, pod_set], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()[:DIGITS]


@dataclass(frozen=True, slots=True)
class Priority:
    """The priority of a Workload, and the class that it comes from."""

    value: int
    group: str = ""
    """`kueue.x-k8s.io` or `scheduling.k8s.io`; empty without a class."""
    name: str = ""

    def fields(self, version: str) -> KubeObject:
        """The fields of the Workload's spec."""
        if not self.name:
            return {"priority": self.value}
        if version == "v1beta1":
            source = "workloadpriorityclass" if self.group == GROUP else "priorityclass"
            group = GROUP if self.group == GROUP else "scheduling.k8s.io"
            return {
                "priority": self.value,
                "priorityClassName": self.name,
                "priorityClassSource": f"{group}/{source}",
            }
        kind = "WorkloadPriorityClass" if self.group == GROUP else "PriorityClass"
        return {"priority": self.value, "priorityClassRef": {"group": self.group, "kind": kind, "name": self.name}}


def workload(
    name: str, namespace: str, uid: str, demand: Demand, priority: Priority, version: str, *, suspended: bool
) -> KubeObject:
    """The Workload of a job that is not managed by another cluster."""
    return {
        "apiVersion": f"{GROUP}/{version}",
        "kind": "Workload",
        "metadata": {
            "name": workload_name(name, uid),
            "namespace": namespace,
            "labels": {**job_labels(name, uid), JOB_UID: uid},
            "annotations": {**annotations_of(demand), **({SUSPENDED: "true"} if suspended else {})},
            "ownerReferences": [owner_reference(name, uid)],
        },
        "spec": {**spec_of(demand, priority, version), "active": not suspended},
    }


def annotations_of(demand: Demand) -> dict[str, str]:
    """What the Workload remembers about the demand."""
    return {
        DIGEST: f"{demand.digest}.{demand.shape}",
        GPUS_PER_REPLICA: str(demand.gpus_per_replica),
    }


def spec_of(demand: Demand, priority: Priority, version: str) -> KubeObject:
    """The fields of the spec that follow from the job."""
    seconds = {"maximumExecutionTimeSeconds": demand.max_seconds} if demand.max_seconds else {}
    return {"queueName": demand.queue, "podSets": [demand.pod_set], **seconds, **priority.fields(version)}


def workload_name(name: str, uid: str) -> str:
    """The name of the Workload of a job."""
    suffix = f"-{uid[:8]}"
    return f"ptj-{name}"[: NAME_LENGTH - len(suffix)].rstrip("-.") + suffix


def _template(spec: ParallelTrainingJobSpec, profile: Profile | None) -> KubeObject:
    """As much of a worker pod as Kueue reads: what it requests, and what it requires of nodes."""
    beside: KubeObject = {}
    if profile is not None and profile.containers:
        beside["initContainers"] = requesting_containers(profile)
    if profile is not None and profile.runtime_class_name:
        # Kueue adds what the class itself takes (its overhead).
        beside["runtimeClassName"] = profile.runtime_class_name
    workers, requests = spec.workers, worker_requests(spec.workers)
    container = {
        "name": labels.WORKER_CONTAINER,
        "image": workers.image,
        "resources": {"requests": requests, "limits": {k: v for k, v in requests.items() if k != "cpu"}},
    }
    priority = {"priorityClassName": spec.priority_class_name} if spec.priority_class_name else {}
    return {
        "metadata": {},
        "spec": {
            "restartPolicy": "Never",
            "containers": [container],
            **beside,
            "nodeSelector": dict(workers.node_selector),
            "tolerations": [toleration.wire() for toleration in workers.tolerations],
            **priority,
        },
    }


def _topology(annotations: Mapping[str, str]) -> KubeObject:
    """The topology that the pods' annotations ask for, in the form of a Workload."""
    asked: KubeObject = {}
    if REQUIRED in annotations:
        asked["required"] = annotations[REQUIRED]
    if PREFERRED in annotations:
        asked["preferred"] = annotations[PREFERRED]
    if annotations.get(UNCONSTRAINED) == "true":
        asked["unconstrained"] = True
    return asked
