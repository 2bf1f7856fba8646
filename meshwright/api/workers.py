"""`spec.workers`: the pods that the ranks run in."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from meshwright.api.base import ApiModel, ClaimName, Image, Quantity, ShortText
from meshwright.api.labels import GPU_RESOURCE


def covers_taint(
    key: str | None, operator: str, value: str | None, effect: str | None, taint: Mapping[str, Any]
) -> bool:
    """Return whether a toleration with these fields covers a taint of a Node: effect, then key, then value."""
    if effect and effect != taint.get("effect"):
        return False
    if key and key != taint.get("key"):
        return False
    return operator == "Exists" or (bool(key) and (value or "") == (taint.get("value") or ""))


class Toleration(ApiModel):
    """A taint the worker pods tolerate."""

    key: Annotated[str, Field(min_length=1, max_length=316)] | None = None
    """Taint key. Without a key, operator `Exists` matches every taint."""
    operator: Annotated[str, Field(pattern="^(Exists|Equal)$", max_length=6)] = "Equal"
    """`Exists` or `Equal`."""
    value: Annotated[str, Field(max_length=63)] | None = None
    """Taint value to match if the operator is `Equal`."""
    effect: Annotated[str, Field(pattern="^(NoSchedule|PreferNoSchedule|NoExecute)$", max_length=16)] | None = None
    """Taint effect to match. Defaults to all effects."""
    toleration_seconds: Annotated[int, Field(ge=0, le=2147483647)] | None = None
    """Time for which a `NoExecute` taint is tolerated."""


class KeyReference(ApiModel):
    """One key of a Secret or ConfigMap in the job's namespace."""

    name: ShortText
    """Name of the object."""
    key: ShortText
    """Key in the object."""


class EnvSource(ApiModel):
    """The source of an environment variable's value: exactly one of the two."""

    secret_key_ref: KeyReference | None = None
    """A key of a Secret. Only the kubelet reads it, never the operator."""
    config_map_key_ref: KeyReference | None = None
    """A key of a ConfigMap."""


class EnvVar(ApiModel):
    """An environment variable of the worker container."""

    name: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    """Name. Names that begin with `MESHWRIGHT_` are reserved."""
    value: Annotated[str, Field(max_length=4096)] = ""
    """Value. Excludes `valueFrom`."""
    value_from: EnvSource | None = None
    """Source of the value, for secrets that must not be in the job, such as tokens. Excludes `value`."""


class ImagePullPolicy(StrEnum):
    """When the image is pulled."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class ImagePullSecret(ApiModel):
    """A secret with the credentials of an image registry."""

    name: ShortText
    """Name of a secret in the job's namespace."""


# Sources of volumes are an allow-list, without host paths.
class VolumeSpec(ApiModel):
    """A volume and where it is mounted. Exactly one of `claimName`, `configMapName`, `secretName`, `scratch`."""

    name: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    """Name, unique in the list. `shm`, `checkpoints`, `data` and `scripts` are reserved."""
    mount_path: Annotated[str, Field(min_length=2, max_length=253, pattern=r"^/[^:]*[^:/]$")]
    """Absolute path in the container. Paths below `/meshwright` and `/dev` are reserved."""
    claim_name: ClaimName | None = None
    """A PersistentVolumeClaim of the job's namespace that every node with workers can mount."""
    config_map_name: ShortText | None = None
    """A ConfigMap of the job's namespace: its keys become files."""
    secret_name: ShortText | None = None
    """A Secret of the job's namespace: its keys become files. The operator never reads it."""
    scratch: Quantity | None = None
    """Size limit of an emptyDir volume, which is deleted with the pod, such as `100Gi`."""
    read_only: bool = False
    """Whether a claim is mounted read-only. ConfigMaps and Secrets always are."""


class PodClaim(ApiModel):
    """Devices that each pod claims through Dynamic Resource Allocation. Exactly one of `resourceClaimTemplateName` and
    `resourceClaimName`.
    """

    name: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    """Name, unique in the list. `nvlink` is reserved."""
    resource_claim_template_name: ShortText | None = None
    """ResourceClaimTemplate of the job's namespace, from which each pod gets a claim of its own."""
    resource_claim_name: ShortText | None = None
    """ResourceClaim of the job's namespace, which all pods share. Several pods need an allocated one."""
    request: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    """Request of the claim whose devices the container gets. By default it gets all devices of the claim."""


class ResourcesSpec(ApiModel):
    """What one worker pod requests in addition to its GPUs. Placement counts all of it."""

    cpu: Quantity | None = None
    """CPU request of the pod, such as `16` or `500m`."""
    memory: Quantity | None = None
    """Memory request and limit of the pod, such as `64Gi`."""
    devices: Annotated[dict[str, Annotated[int, Field(ge=1, le=1024)]], Field(max_length=16)] | None = None
    """Other extended resources and their number, such as `rdma/ib: 1` or `vpc.amazonaws.com/efa: 32`: what NCCL needs
    for the network of the cluster."""
    huge_pages: Annotated[dict[str, Quantity], Field(max_length=4)] | None = None
    """Huge pages by page size, such as `2Mi: 5120Mi`."""
    ephemeral_storage: Quantity | None = None
    """Request and limit of the node's local storage, such as `100Gi`."""
    shared_memory: Quantity | None = None
    """Size limit of `/dev/shm`, which counts as memory of the pod. Without it, `memory` limits it."""
    exclusive_cpus: bool | None = None
    """Whether the CPU request is also the limit, so that a node with the static CPU manager gives the pod CPUs of its
    own. Needs `cpu`, a whole number, and `memory`."""


class PodGroupKind(StrEnum):
    """Whose PodGroup the operator makes for the gang."""

    VOLCANO = "Volcano"
    KAI = "KAI"
    COSCHEDULING = "Coscheduling"
    KUBERNETES = "Kubernetes"


class PodGroupSpec(ApiModel):
    """The PodGroup of another scheduler, with which it binds all pods or none."""

    kind: PodGroupKind
    """`Volcano`, `KAI` (KAI Scheduler), `Coscheduling` (the scheduler plugin) or `Kubernetes` (kube-scheduler from 1.36
    on, with the feature gates `GenericWorkload` and `GangScheduling`)."""
    queue: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    """Queue of Volcano or KAI. Without it, Volcano uses its default queue. KAI needs it."""


class WorkersSpec(ApiModel):
    """The worker pods. One pod runs the consecutive ranks of `gpusPerWorker` GPUs on one node."""

    image: Image
    """Container image with the worker runtime, or with the command of `runtime.command`."""
    image_pull_policy: ImagePullPolicy | None = None
    """When the image is pulled. Defaults to `Always` for the tag `latest` and to `IfNotPresent` for others."""
    image_pull_secrets: Annotated[
        list[ImagePullSecret], Field(max_length=16, json_schema_extra={"x-list-map-key": "name"})
    ] = []
    """Secrets with the credentials of the image's registry."""
    gpus_per_worker: Annotated[int, Field(ge=1, le=1024)] = 8
    """Number of GPUs, and therefore ranks, of one pod. Must divide the world size, and be a multiple or a divisor of
    `parallelism.tensor`."""
    gpu_resource: Annotated[str, Field(min_length=3, max_length=253, pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")] = (
        GPU_RESOURCE
    )
    """Extended resource of the GPUs."""
    resources: ResourcesSpec = ResourcesSpec()
    """CPU, memory, network devices and other resources of each pod."""
    resource_claims: (
        Annotated[list[PodClaim], Field(max_length=16, json_schema_extra={"x-list-map-key": "name"})] | None
    ) = None
    """Devices that the pods claim through Dynamic Resource Allocation. If a claim requests the device class of
    `gpuResource`, the GPUs come from the claim."""
    env: Annotated[list[EnvVar], Field(max_length=64, json_schema_extra={"x-list-map-key": "name"})] = []
    """Further environment variables of the worker container."""
    volumes: Annotated[list[VolumeSpec], Field(max_length=16, json_schema_extra={"x-list-map-key": "name"})] = []
    """Further volumes of the worker container: claims, ConfigMaps, Secrets and scratch space."""
    labels: Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=32)] = {}
    """Further labels of the pods, such as the queue of another scheduler. Keys that begin with `meshwright.dev/` or
    `app.kubernetes.io/` are reserved."""
    annotations: Annotated[dict[str, Annotated[str, Field(max_length=1024)]], Field(max_length=32)] = {}
    """Further annotations of the pods, such as the pod group of another scheduler. Keys that begin with
    `meshwright.dev/` or `prometheus.io/` are reserved."""
    scheduler_name: (
        Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")] | None
    ) = None
    """Scheduler that places the pods, such as `volcano`, `kai-scheduler`, or `default-scheduler` with Kueue. The
    operator then neither gates nor pins the pods. When all are bound it maps the ranks onto their nodes. By default
    the operator places the pods."""
    pod_group: PodGroupSpec | None = None
    """PodGroup that the operator makes for the pods, resizes and deletes. Needs `schedulerName`. The name of the group
    is set in the pods as their scheduler reads it."""
    node_selector: Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=32)] = {}
    """Labels that a node must have."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = []
    """Taints that the pods tolerate."""
    profile: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")] | None = (
        None
    )
    """Profile of the administrator, which gives the pods what these fields cannot request, such as host paths or
    sidecars of the network. The administrator decides which namespaces may use it."""
    service_account_name: ShortText | None = None
    """Service account of the pods. Its token is not mounted."""
    run_as_user: Annotated[int, Field(ge=1, le=2147483647)] | None = None
    """User ID of the processes. Defaults to 65532. Root is not allowed."""
    run_as_group: Annotated[int, Field(ge=1, le=2147483647)] | None = None
    """Group ID of the processes, and of volumes that support it. Defaults to 65532."""
    supplemental_groups: Annotated[list[Annotated[int, Field(ge=1, le=2147483647)]], Field(max_length=32)] | None = None
    """Further groups of the processes, such as the one on the node that owns AMD GPUs."""
    termination_grace_period_seconds: Annotated[int, Field(ge=1, le=3600)] = 60
    """Time to write a checkpoint after SIGTERM before the pod is killed."""
