"""The volumes that a worker may have in addition to the operator's: an allow-list, never a host path."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from meshwright.api.base import ApiModel
from meshwright.api.field_types import Quantity, ShortText


class VolumeSpec(ApiModel):
    """A volume and where it is mounted. Exactly one of `claimName`, `configMapName`, `secretName`, `scratch`."""

    name: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    """Name, unique in the list. `shm`, `checkpoints`, `data` and `scripts` are reserved."""
    mount_path: Annotated[str, Field(min_length=2, max_length=253, pattern=r"^/[^:]*[^:/]$")]
    """Absolute path in the container. Paths below `/meshwright` and `/dev` are reserved."""
    claim_name: ShortText | None = None
    """A PersistentVolumeClaim of the job's namespace that every node with workers can mount."""
    config_map_name: ShortText | None = None
    """A ConfigMap of the job's namespace: its keys become files."""
    secret_name: ShortText | None = None
    """A Secret of the job's namespace: its keys become files. The operator never reads it."""
    scratch: Quantity | None = None
    """Size limit of an emptyDir volume, which is deleted with the pod, such as `100Gi`."""
    read_only: bool = False
    """Whether a claim is mounted read-only. ConfigMaps and Secrets always are."""
