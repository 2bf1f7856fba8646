"""The device of a rank: the only module that checks whether there is a GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch.utils import deterministic


@dataclass(frozen=True, slots=True)
class Device:
    """The device that a rank computes on, and the backend of its collectives."""

    torch: torch.device
    backend: str
    """torch.distributed's backend: nccl between GPUs, gloo between CPUs."""


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """Properties of a rank's device."""

    capability: tuple[int, int] | None = None
    """Compute capability, major and minor; None for a CPU."""
    name: str = "CPU"
    count: int = 0
    """Number of GPUs that this process sees."""


def device_properties(local_rank: int) -> DeviceProperties:
    """Return the properties of the device that `init_device` would use. Allocates nothing; safe without a GPU."""
    if not torch.cuda.is_available():
        return DeviceProperties()
    count = torch.cuda.device_count()
    seen = min(local_rank, count - 1)
    return DeviceProperties(torch.cuda.get_device_capability(seen), torch.cuda.get_device_name(seen), count)


def init_device(local_rank: int, *, reproducible: bool = True) -> Device:
    """Use GPU number `local_rank`, or one CPU thread if there is no GPU.

    Ranks share the cores of a machine without GPUs, so with more threads per rank they would wait for each other. With
    `reproducible` kernels, a resumed run repeats the uninterrupted run bit by bit.
    """
    if reproducible:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # With warnings only, attention's backward pass would still sum in a nondeterministic order
    # (`attention_backward.cu`).
    torch.use_deterministic_algorithms(reproducible)
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        use_device(device)
        return Device(device, "nccl")
    torch.set_num_threads(1)
    return Device(torch.device("cpu"), "gloo")


def default_device() -> torch.device:
    """Return the device of a process that has the machine for itself: the first GPU, or the CPU with all of its
    threads.
    """
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def use_device(device: torch.device) -> None:
    """Make this rank's device the current one of the calling thread.

    A new thread's current device is the machine's first GPU, and the first CUDA call would create a context there.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
