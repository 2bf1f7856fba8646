"""The document of profiles, with a closed schema.

A profile lets worker pods have what a job's own fields cannot request, such as host paths, capabilities or sidecars.
The administrator names the profiles and the namespaces that may use them. A profile never replaces what the operator
itself sets: its labels, environment variables, volumes and container.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from meshwright.api.base import ApiModel, Quantity, ShortText
from meshwright.api.labels import WORKER_CONTAINER
from meshwright.api.workers import EnvVar, ImagePullPolicy, Toleration
from meshwright.rules.workers import (
    ANNOTATION_PREFIXES,
    LABEL_PREFIXES,
    VARIABLE_NAMES,
    VARIABLE_PREFIXES,
    VOLUME_NAMES,
)

MAX_BYTES = 24_576
"""Length of one profile as JSON: the status of each job that uses it contains a copy."""
WORKER_PATHS = ("/meshwright", "/dev/shm")  # noqa: S108 - a path in the worker's container
"""Paths of the worker's container at which the operator mounts its own volumes."""


HOST_PATH_TYPES = "^(|DirectoryOrCreate|Directory|FileOrCreate|File|Socket|CharDevice|BlockDevice)$"


def _variable(variable: EnvVar) -> EnvVar:
    if variable.name.startswith(VARIABLE_PREFIXES) or variable.name in VARIABLE_NAMES:
        raise ValueError(f"`{variable.name}` is set by the operator or the agent: remove it")
    if variable.value_from is not None:
        raise ValueError(f"`{variable.name}` has `valueFrom`: only `value` is supported in a profile")
    return variable


def _not_reserved(prefixes: tuple[str, ...], keys: dict[str, str]) -> dict[str, str]:
    taken = sorted(key for key in keys if key.startswith(prefixes))
    if taken:
        raise ValueError(f"`{taken[0]}` is reserved for the operator: remove it")
    return keys


Name = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
Path = Annotated[str, Field(min_length=2, max_length=1024, pattern=r"^/[^:]*[^:/]$")]
Capability = Annotated[str, Field(min_length=3, max_length=64, pattern=r"^[A-Z][A-Z_]*[A-Z]$")]
Variables = Annotated[list[Annotated[EnvVar, AfterValidator(_variable)]], Field(max_length=64)]
Labels = Annotated[
    dict[str, Annotated[str, Field(max_length=63)]],
    Field(max_length=32),
    AfterValidator(lambda keys: _not_reserved(LABEL_PREFIXES, keys)),
]
Annotations = Annotated[
    dict[str, Annotated[str, Field(max_length=8192)]],
    Field(max_length=32),
    AfterValidator(lambda keys: _not_reserved(ANNOTATION_PREFIXES, keys)),
]
Namespace = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-a-z0-9*?\[\]!]+$")]


class ProfileVolume(ApiModel):
    """A volume of the pod. Exactly one of `hostPath` and `scratch`."""

    name: Name
    """Name, different from the job's volumes. `shm`, `checkpoints`, `data` and `scripts` are reserved."""
    host_path: Path | None = None
    """Path on the node."""
    host_path_type: Annotated[str, Field(pattern=HOST_PATH_TYPES)] = ""
    """Kubernetes' check of the host path, such as `Directory`. Empty: none."""
    scratch: Quantity | None = None
    """Size limit of an emptyDir volume, which containers of the pod can share."""
    mount_path: Path | None = None
    """Where the worker's container mounts it. Without it, only the profile's containers do."""
    read_only: bool = False
    """Whether the worker's container mounts it read-only."""

    @model_validator(mode="after")
    def _check(self) -> ProfileVolume:
        if (self.host_path is None) == (self.scratch is None):
            raise ValueError("must have exactly one of `hostPath` and `scratch`")
        if self.name in VOLUME_NAMES:
            raise ValueError(f"`name` is {self.name}, which is reserved for the operator: rename it")
        path = self.mount_path or ""
        if any(path == taken or path.startswith(f"{taken}/") for taken in WORKER_PATHS):
            raise ValueError(f"`mountPath` is {path}, which is reserved for the operator: choose another path")
        return self


class ProfileMount(ApiModel):
    """A volume in a container of the profile."""

    volume: Name
    """Name of a volume of the profile."""
    mount_path: Path
    """Absolute path in the container."""
    read_only: bool = False
    """Whether it is mounted read-only."""


class ProfileContainer(ApiModel):
    """An init container or a sidecar."""

    name: Name
    """Name, different from the other containers."""
    image: Annotated[str, Field(min_length=1, max_length=1024)]
    """Container image."""
    image_pull_policy: ImagePullPolicy | None = None
    """When the image is pulled."""
    command: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=64)] = []
    """Entry point. Empty: that of the image."""
    args: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=64)] = []
    """Arguments. Empty: those of the image."""
    env: Variables = []
    """Environment variables."""
    mounts: Annotated[list[ProfileMount], Field(max_length=16)] = []
    """Volumes of the profile, and where they are mounted."""
    run_as_root: bool = False
    """Whether it runs as user 0, with the container runtime's default capabilities."""
    capabilities: Annotated[list[Capability], Field(max_length=16)] = []
    """Linux capabilities, such as `NET_ADMIN`."""
    privileged: bool = False
    """Whether it has all capabilities and devices of the node."""
    cpu: Quantity | None = None
    """CPU request and limit. Placement counts it."""
    memory: Quantity | None = None
    """Memory request and limit. Placement counts it."""


class Profile(ApiModel):
    """What the pods of a job with this profile have in addition."""

    description: Annotated[str, Field(max_length=1024)] = ""
    """What it is for."""
    namespaces: Annotated[list[Namespace], Field(max_length=1000)] = []
    """Namespaces whose jobs may use it: names or globs. Empty: none."""
    labels: Labels = {}
    """Labels of the pods. They replace the job's."""
    annotations: Annotations = {}
    """Annotations of the pods. They replace the job's."""
    node_selector: Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=32)] = {}
    """Labels that a node must have, in addition to the job's."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = []
    """Taints that the pods tolerate, in addition to the job's."""
    runtime_class_name: ShortText | None = None
    """RuntimeClass of the pods."""
    host_network: bool = False
    """Whether the pods use the node's network."""
    host_ipc: Annotated[bool, Field(alias="hostIPC")] = False
    """Whether the pods use the node's IPC namespace."""
    run_as_root: bool = False
    """Whether the worker's container runs as user and group 0, unless the job sets `workers.runAsUser`."""
    capabilities: Annotated[list[Capability], Field(max_length=16)] = []
    """Linux capabilities of the worker's container, such as `IPC_LOCK`. They have no effect without `runAsRoot`."""
    privileged: bool = False
    """Whether the worker's container has all capabilities and devices of the node."""
    supplemental_groups: Annotated[list[Annotated[int, Field(ge=1, le=2147483647)]], Field(max_length=32)] = []
    """Further groups of the processes."""
    env: Variables = []
    """Environment variables of the worker's container. A job's own values replace them."""
    devices: Annotated[dict[str, Annotated[int, Field(ge=1, le=1024)]], Field(max_length=16)] = {}
    """Extended resources and their number. A job's own values replace them. Placement counts them."""
    huge_pages: Annotated[dict[str, Quantity], Field(max_length=4)] = {}
    """Huge pages by page size. A job's own values replace them. Placement counts them."""
    volumes: Annotated[list[ProfileVolume], Field(max_length=32)] = []
    """Host paths and scratch space."""
    init_containers: Annotated[list[ProfileContainer], Field(max_length=8)] = []
    """Containers that run before the worker's, in this order."""
    sidecars: Annotated[list[ProfileContainer], Field(max_length=8)] = []
    """Containers that run as long as the worker's. They start after the init containers."""

    @property
    def containers(self) -> list[ProfileContainer]:
        """All containers that it adds."""
        return [*self.init_containers, *self.sidecars]

    @model_validator(mode="after")
    def _check(self) -> Profile:
        names = [volume.name for volume in self.volumes]
        containers = [WORKER_CONTAINER, *(container.name for container in self.containers)]
        for kind, given in (("volumes", names), ("containers", containers)):
            twice = sorted({name for name in given if given.count(name) > 1})
            if twice:
                raise ValueError(f"two {kind} are named `{twice[0]}`: rename one (`{WORKER_CONTAINER}` is reserved)")
        for container in self.containers:
            unknown = [mount.volume for mount in container.mounts if mount.volume not in names]
            if unknown:
                raise ValueError(f"container `{container.name}` mounts `{unknown[0]}`: add it to `volumes`")
        if len(self.model_dump_json(exclude_defaults=True)) > MAX_BYTES:
            raise ValueError(f"must be at most {MAX_BYTES} bytes as JSON: shorten it")
        return self

    def allows(self, namespace: str) -> bool:
        """Whether jobs of the namespace may use it."""
        return any(fnmatchcase(namespace, pattern) for pattern in self.namespaces)

    def grants(self) -> list[str]:
        """What it grants beyond the restricted Pod Security Standard, for messages."""
        paths = [volume.host_path for volume in self.volumes if volume.host_path]
        capabilities = sorted({*self.capabilities, *(name for one in self.containers for name in one.capabilities)})
        root = [WORKER_CONTAINER] if self.run_as_root else []
        root += [container.name for container in self.containers if container.run_as_root]
        privileged = [WORKER_CONTAINER] if self.privileged else []
        privileged += [container.name for container in self.containers if container.privileged]
        found = [
            ("host paths", paths),
            ("privileged containers", privileged),
            ("capabilities", capabilities),
            ("root in", root),
            ("init containers", [container.name for container in self.init_containers]),
            ("sidecars", [container.name for container in self.sidecars]),
            ("runtime class", [self.runtime_class_name] if self.runtime_class_name else []),
        ]
        shared = [("host network", self.host_network), ("host IPC", self.host_ipc)]
        return [
            *(what for what, used in shared if used),
            *(f"{what} {', '.join(names)}" for what, names in found if names),
        ]
