"""`spec.preflight`: checks of worker pods before their ranks start."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from meshwright.api.base import ApiModel


class Check(StrEnum):
    """A check of a worker pod."""

    NETWORK_DEVICE = "NetworkDevice"
    """The device of the network is in the pod."""
    NETWORK_LIBRARY = "NetworkLibrary"
    """The image has the libraries with which NCCL uses the network."""
    LOCKED_MEMORY = "LockedMemory"
    """Memory can be locked without limit, as RDMA needs it."""
    IMEX_CHANNEL = "ImexChannel"
    """The pod has an IMEX channel, without which NVLink ends at the node."""
    NUMA = "Numa"
    """The pod may use CPUs of the NUMA nodes of its GPUs."""
    CLOCK_SKEW = "ClockSkew"
    """The clock of the node is that of the operator."""
    VOLUME = "Volume"
    """The checkpoint volume is writable, and the same one on all workers."""
    SHARED_MEMORY = "SharedMemory"
    """`/dev/shm` is large enough for NCCL and data loaders."""
    GPU_HEALTH = "GpuHealth"
    """GPUs have no memory errors, and run at full speed."""
    HUGE_PAGES = "HugePages"
    """The node has the huge pages that the pod requests."""


class PreflightMode(StrEnum):
    """What findings lead to."""

    WARN = "Warn"
    IGNORE = "Ignore"


class PreflightSpec(ApiModel):
    """What follows from the findings of workers about their pods. An edit restarts nothing."""

    mode: PreflightMode = PreflightMode.WARN
    """`Warn`: findings become an event and the condition `PreflightPassed`, and ranks start. `Ignore`: no findings."""
    fatal: Annotated[list[Check], Field(max_length=16)] = []
    """Checks whose findings prevent the start: the pods are released, and start later, on other nodes if possible."""
    ignored: Annotated[list[Check], Field(max_length=16)] = []
    """Checks whose findings are ignored."""
    numa_binding: bool = True
    """Whether each rank runs only on CPUs of one NUMA node: that of its GPU, if it is known. Takes effect when ranks
    start next."""
