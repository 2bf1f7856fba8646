"""The most memory that this process used, by kind. Reading it does not synchronize with the device."""

from __future__ import annotations

import resource

import torch

from meshwright_worker.rank.task import MemoryPeak

_KIB = 1024


def memory_peaks(device: torch.device) -> tuple[MemoryPeak, ...]:
    """Return the peaks since the process started: of its host memory, and of the device's allocator."""
    host = MemoryPeak("host", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB)
    if device.type != "cuda":
        return (host,)
    return (
        host,
        MemoryPeak("gpu_allocated", torch.cuda.max_memory_allocated(device)),
        MemoryPeak("gpu_reserved", torch.cuda.max_memory_reserved(device)),
    )
