"""Host memory that a rank shares with the process that writes its checkpoints.

Each segment is a file without a name (memfd): it needs no space in `/dev/shm`, is counted in the pod's memory like any
other, and is gone when no process maps it, however these exit.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshwright_worker.checkpoint_errors import CheckpointError

log = logging.getLogger(__name__)

_ALIGNMENT = 512
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """Where a contiguous tensor is in a segment."""

    segment: int
    offset: int
    dtype: torch.dtype
    shape: torch.Size


class Segment:
    """A piece of shared memory. The descriptor is closed when no tensor in it is left."""

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        """Create one of `size` bytes, or map the one behind `descriptor`, which this object then owns."""
        self.number = next(_numbers)
        self.size = size
        if descriptor is None:
            descriptor = os.memfd_create("meshwright-checkpoint", os.MFD_CLOEXEC)
            # Allocated now: without free memory a write to it would otherwise kill the process with SIGBUS.
            os.posix_fallocate(descriptor, 0, size)
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._bytes = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        self._first = self._bytes.data_ptr()

    def tensor(self, offset: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """The tensor at an offset."""
        return self._bytes[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def locate(self, tensor: torch.Tensor) -> SharedTensor | None:
        """Where a tensor is in this segment; None if it is not."""
        offset = tensor.data_ptr() - self._first
        inside = offset >= 0 and offset + tensor.nbytes <= self.size and tensor.is_contiguous()
        return SharedTensor(self.number, offset, tensor.dtype, tensor.shape) if inside else None

    def pin(self) -> None:
        """Let GPUs copy to it asynchronously. Without it copies are slower, and still right."""
        code = int(torch.cuda.cudart().cudaHostRegister(self._first, self.size, 0))  # type: ignore[no-untyped-call]
        if code:
            log.warning("shared memory for checkpoints cannot be pinned (CUDA error %d): copies to it are slower", code)


class SharedMemory:
    """The segments that the staged copy of one rank is in."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []

    def allocate(self, templates: Sequence[torch.Tensor], *, pinned_memory: bool) -> list[torch.Tensor]:
        """As `allocate_host_tensors`, in one new segment."""
        offsets, end = [], 0
        for template in templates:
            offsets.append(end)
            end += -(-template.numel() * template.element_size() // _ALIGNMENT) * _ALIGNMENT
        if not templates:
            return []
        try:
            segment = Segment(max(end, _ALIGNMENT))
        except OSError as error:
            raise CheckpointError(
                f"`checkpoint.writer: Process` needs {end} bytes for the copy of this rank's state: {error.strerror}: "
                "raise `workers.resources.memory`"
            ) from error
        if pinned_memory:
            segment.pin()
        self.segments.append(segment)
        return [
            segment.tensor(offset, template.dtype, template.shape)
            for offset, template in zip(offsets, templates, strict=True)
        ]
