"""The PodGroup of a gang for another scheduler, and what its pods need so that this scheduler knows them.

With it the scheduler binds all pods or none. Its name depends on the job's uid only, so that a new job with the name of
a deleted one never takes over its group.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from meshwright.api.objects import KubeObject
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.workers import PodGroupKind
from meshwright.planner.cluster.pod_resources import worker_requests
from meshwright_operator.manifests.owned_objects import job_labels, owner_reference

NAME_LENGTH = 63
KAI_QUEUE = "kai.scheduler/queue"


class Resize(StrEnum):
    """How a group of this kind gets another number of pods."""

    PATCH = "Patch"
    RECREATE = "Recreate"
    """Its spec is immutable. A group with the same name may be made again."""


@dataclass(frozen=True, slots=True)
class Form:
    """The API of one kind of group."""

    group: str
    version: str
    scheduler: str
    """What must be installed for the kind to exist."""
    resize: Resize = Resize.PATCH


FORMS = {
    PodGroupKind.VOLCANO: Form("scheduling.volcano.sh", "v1beta1", "Volcano"),
    PodGroupKind.KAI: Form("scheduling.run.ai", "v2alpha2", "KAI Scheduler"),
    PodGroupKind.COSCHEDULING: Form("scheduling.x-k8s.io", "v1alpha1", "the coscheduling plugin"),
    PodGroupKind.KUBERNETES: Form(
        "scheduling.k8s.io",
        "v1alpha2",
        "Kubernetes 1.36 with the feature gate GenericWorkload and the API scheduling.k8s.io/v1alpha2",
        Resize.RECREATE,
    ),
}


def group_name(name: str, uid: str) -> str:
    """The name of the group of a job."""
    suffix = f"-{uid[:8]}"
    return name[: NAME_LENGTH - len(suffix)].rstrip("-.") + suffix


def pod_group(name: str, namespace: str, uid: str, spec: ParallelTrainingJobSpec, members: int) -> KubeObject:
    """The group of a job with so many pods."""
    group = spec.workers.pod_group
    assert group is not None
    form = FORMS[group.kind]
    labels = job_labels(name, uid)
    if group.kind is PodGroupKind.KAI and group.queue:
        labels[KAI_QUEUE] = group.queue
    return {
        "apiVersion": f"{form.group}/{form.version}",
        "kind": "PodGroup",
        "metadata": {
            "name": group_name(name, uid),
            "namespace": namespace,
            "labels": labels,
            "ownerReferences": [owner_reference(name, uid)],
        },
        "spec": group_spec(spec, members),
    }


def group_spec(spec: ParallelTrainingJobSpec, members: int) -> KubeObject:
    """What the group asks its scheduler for."""
    group = spec.workers.pod_group
    assert group is not None
    if group.kind is PodGroupKind.KUBERNETES:
        return {"schedulingPolicy": {"gang": {"minCount": members}}}
    asked: KubeObject = {"minMember": members}
    if group.kind is PodGroupKind.COSCHEDULING:
        return asked
    if group.queue:
        asked["queue"] = group.queue
    if spec.priority_class_name:
        asked["priorityClassName"] = spec.priority_class_name
    if group.kind is PodGroupKind.VOLCANO:
        asked["minResources"] = _times(worker_requests(spec.workers), members)
    return asked


def members_of(obj: KubeObject) -> int:
    """The number of pods that a group was made for; 0 if it is damaged."""
    spec = obj.get("spec") or {}
    gang = (spec.get("schedulingPolicy") or {}).get("gang") or {}
    count = spec.get("minMember", gang.get("minCount", 0))
    return count if isinstance(count, int) else 0


def pod_labels(name: str, uid: str, spec: ParallelTrainingJobSpec) -> dict[str, str]:
    """Labels by which the group's scheduler knows the pods."""
    group = spec.workers.pod_group
    if group is None:
        return {}
    if group.kind is PodGroupKind.COSCHEDULING:
        return {"scheduling.x-k8s.io/pod-group": group_name(name, uid)}
    return {KAI_QUEUE: group.queue} if group.kind is PodGroupKind.KAI and group.queue else {}


def pod_annotations(name: str, uid: str, spec: ParallelTrainingJobSpec) -> dict[str, str]:
    """The same for annotations."""
    group = spec.workers.pod_group
    if group is None:
        return {}
    if group.kind is PodGroupKind.VOLCANO:
        return {"scheduling.k8s.io/group-name": group_name(name, uid)}
    if group.kind is PodGroupKind.KAI:
        # Without the second one, KAI makes a group of its own for each pod of a kind that it does not know.
        return {"pod-group-name": group_name(name, uid), "kai.scheduler/skip-podgrouper": "true"}
    return {}


def pod_fields(name: str, uid: str, spec: ParallelTrainingJobSpec) -> KubeObject:
    """The same for fields of the pod's spec."""
    group = spec.workers.pod_group
    if group is None or group.kind is not PodGroupKind.KUBERNETES:
        return {}
    return {"schedulingGroup": {"podGroupName": group_name(name, uid)}}


def _times(requests: dict[str, str], count: int) -> dict[str, str]:
    """What all pods request. Amounts with a unit are repeated by Volcano itself: only plain numbers are summed."""
    return {name: str(int(amount) * count) for name, amount in requests.items() if amount.isdigit()}
