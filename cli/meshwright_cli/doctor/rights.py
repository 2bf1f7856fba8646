"""The rights that the operator and the users of jobs need, and reviews of them.

`tests/cli/test_doctor.py` compares the operator's rights with the roles of the chart.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.api.labels import GROUP, KUEUE_QUEUE, PLURAL
from meshwright.api.objects import KubeObject


@dataclass(frozen=True, slots=True, order=True)
class Right:
    """A verb on a resource."""

    verb: str
    resource: str
    """With its subresource, such as `pods/log`."""
    group: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}{f'.{self.group}' if self.group else ''}"

    def review(self, namespace: str | None, *, user: str | None = None, groups: tuple[str, ...] = ()) -> KubeObject:
        """The body of a SelfSubjectAccessReview, or with `user`, of a SubjectAccessReview."""
        plural, _, subresource = self.resource.partition("/")
        attributes = {"verb": self.verb, "group": self.group, "resource": plural, "subresource": subresource}
        if namespace:
            attributes["namespace"] = namespace
        spec: KubeObject = {"resourceAttributes": {key: value for key, value in attributes.items() if value}}
        kind = "SelfSubjectAccessReview"
        if user is not None:
            kind = "SubjectAccessReview"
            spec |= {"user": user, "groups": list(groups)}
        return {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": spec}


def rights(resource: str, *verbs: str, group: str = "") -> tuple[Right, ...]:
    """Several verbs on one resource."""
    return tuple(Right(verb, resource, group) for verb in verbs)


USER_RIGHTS = (
    *rights(PLURAL, "get", "list", "watch", "create", "patch", "delete", group=GROUP),
    *rights(f"{PLURAL}/scale", "patch", group=GROUP),
    *rights("pods", "get", "list"),
    *rights("pods/log", "get"),
    *rights("events", "list"),
)
"""What the commands of this program need in a namespace."""

SOME_COMMANDS = {
    Right("create", "pods"): ("generate", "export", "data upload"),
    Right("create", "pods/exec"): ("profile", "export", "data upload"),
    Right("get", "pods/proxy"): ("top",),
}
"""What only some commands need -> these commands. Clusters often withhold it from users who may run jobs."""

DEVICES = "resource.k8s.io"

OPERATOR_CLUSTER_RIGHTS = (
    *rights("nodes", "list", "watch"),
    *rights("pods", "list"),
    *(
        right
        for resource in ("resourceslices", "deviceclasses", "resourceclaims")
        for right in rights(resource, "list", "watch", group=DEVICES)
    ),
)
"""What the operator needs in the entire cluster, also if it serves only some namespaces."""

OPERATOR_RIGHTS = (
    *rights(PLURAL, "get", "list", "watch", "delete", group=GROUP),
    *rights(f"{PLURAL}/status", "patch", group=GROUP),
    *rights(f"{PLURAL}/finalizers", "update", group=GROUP),
    *rights("pods", "get", "list", "watch", "create", "patch", "delete"),
    *rights("services", "create", "get"),
    *rights("secrets", "create"),
    *rights("events", "create", "patch", "list"),
    *rights("persistentvolumeclaims", "get", "list"),
    *rights("resourceclaims", "get", group=DEVICES),
    *rights("resourceclaimtemplates", "get", group=DEVICES),
    *rights("computedomains", "create", "get", group="resource.nvidia.com"),
)
"""What the operator needs in each namespace that it serves."""

KUEUE_GROUP = "kueue.x-k8s.io"
KUEUE_RIGHTS = (
    *rights("workloads", "get", "list", "watch", "create", "patch", "delete", group=KUEUE_GROUP),
    *rights("workloads/status", "patch", group=KUEUE_GROUP),
)
"""What the operator needs in namespaces whose jobs name a queue of Kueue."""

KUEUE_CLUSTER_RIGHTS = (
    *rights("resourceflavors", "get", group=KUEUE_GROUP),
    *rights("workloadpriorityclasses", "get", group=KUEUE_GROUP),
    *rights("priorityclasses", "get", group="scheduling.k8s.io"),
)
"""What it then needs in the entire cluster."""

POD_GROUP_RIGHTS = {
    **{
        kind: rights("podgroups", "get", "create", "patch", "delete", group=group)
        for kind, group in (
            ("Volcano", "scheduling.volcano.sh"),
            ("KAI", "scheduling.run.ai"),
            ("Coscheduling", "scheduling.x-k8s.io"),
        )
    },
    "Kubernetes": rights("podgroups", "get", "create", "delete", group="scheduling.k8s.io"),
}
"""`workers.podGroup.kind` -> what the operator needs in namespaces with such jobs."""

QUEUE_RIGHTS = frozenset(
    {*KUEUE_RIGHTS, *KUEUE_CLUSTER_RIGHTS, *(right for found in POD_GROUP_RIGHTS.values() for right in found)}
)
"""The rights that `queues` in the values of the chart gives."""


def queue_rights(job: KubeObject) -> tuple[Right, ...]:
    """The rights in its namespace that the operator needs for a job in a queue of another project."""
    labels = (job.get("metadata") or {}).get("labels") or {}
    group = (((job.get("spec") or {}).get("workers") or {}).get("podGroup") or {}).get("kind")
    return (*(KUEUE_RIGHTS if KUEUE_QUEUE in labels else ()), *POD_GROUP_RIGHTS.get(str(group), ()))


OPERATOR_HOME_RIGHTS = (
    *rights("leases", "create", group="coordination.k8s.io"),
    *rights("secrets", "create"),
)
"""What the operator needs in its own namespace, apart from the named Lease and Secret."""
