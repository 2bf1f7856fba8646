"""The device of a rank: the one place that asks whether there is a GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch.utils import deterministic


@dataclass(frozen=True, slots=True)
class Device:
    """Where a rank computes and what its collectives run on."""

    torch: torch.device
    backend: str
    """torch.distributed's back end: nccl between GPUs, gloo between CPUs."""


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """What a rank's device says of itself."""

    capability: tuple[int, int] | None = None
    """Compute capability, major and minor; None of a CPU."""
    name: str = "CPU"
    count: int = 0
    """GPUs that this process sees."""


def device_properties(local_rank: int) -> DeviceProperties:
    """Of the device that `init_device` would take. Takes nothing yet, and asks a GPU that is not there for nothing."""
    if not torch.cuda.is_available():
        return DeviceProperties()
    count = torch.cuda.device_count()
    seen = min(local_rank, count - 1)
    return DeviceProperties(torch.cuda.get_device_capability(seen), torch.cuda.get_device_name(seen), count)


def init_device(local_rank: int, *, reproducible: bool = True) -> Device:
    """Take the GPU number `local_rank`, or one CPU thread where there is no GPU.

    Several ranks share the cores of a machine without GPUs, so more than one thread a rank only makes them wait for
    each other. With `reproducible` kernels a resumed run repeats the uninterrupted one bit by bit.
    """
    if reproducible:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # With warnings alone attention's backward pass would still add up in any order (`attention_backward.cu`).
    torch.use_deterministic_algorithms(reproducible)
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        use_device(device)
        return Device(device, "nccl")
    torch.set_num_threads(1)
    return Device(torch.device("cpu"), "gloo")


def default_device() -> torch.device:
    """Where a process computes that has the machine for itself: the first GPU, or the CPU with all of its threads."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def use_device(device: torch.device) -> None:
    """Let the calling thread work on this rank's device: that of a new thread is the machine's first GPU, on which
    whatever asks for a context would take one.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
