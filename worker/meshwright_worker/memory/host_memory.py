"""Tensors in host memory: in files mapped into it, in pinned blocks, and copies from and to a device.

Mapped files are the tier below host memory (ZeRO-Infinity, arXiv 2104.07857). GPUs copy asynchronously from and to
pinned memory. torch rounds every pinned block up to a power of two, so that a tensor of 1.1 GiB takes 2 GiB. Here
tensors share blocks whose sizes are powers of two, and smaller tensors fill the rest of a block.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

_ALIGNMENT = 512
"""In bytes; torch's blocks on GPUs begin at multiples of it."""
_LARGEST = 1 << 30
"""Maximum size of a block in bytes, unless one tensor needs more."""


def mmap_zeros(directory: str, elements: int, dtype: torch.dtype, prefix: str, option: str) -> torch.Tensor:
    """Return zeros, [elements], in a new unnamed file, which is deleted with the process, however that exits.

    Args:
        directory: for the file; created if it does not exist.
        elements: number of elements.
        dtype: the tensor's format.
        prefix: of the file's temporary name.
        option: the field that names the directory.

    Raises:
        OSError: the directory cannot be created, or has no free space.
    """
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=prefix, dir=directory)
        try:
            # A write to a mapping without free disk space kills the process with SIGBUS: allocate the space now.
            os.posix_fallocate(descriptor, 0, max(1, elements) * dtype.itemsize)
            return torch.from_file(name, shared=True, size=max(1, elements), dtype=dtype)[:elements]
        finally:
            os.close(descriptor)
            os.unlink(name)
    except OSError as error:
        problem = f"`{option}: {directory}`: cannot create the directory, or allocate a file in it: {error.strerror}"
        raise OSError(error.errno, problem) from error


@dataclass
class PinnedBlock:
    """One block for several tensors."""

    size: int
    """Size in bytes, a power of two."""
    used: int = 0
    places: list[tuple[int, int]] = field(default_factory=list)
    """(index of a tensor, byte offset)."""


def pack_into_blocks(sizes: Sequence[int]) -> list[PinnedBlock]:
    """Assign tensors of these sizes in bytes to blocks: largest first, each into the first block that fits it."""
    blocks: list[PinnedBlock] = []
    padded_sizes = [-(-max(1, size) // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    remaining = sum(padded_sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        padded_size = padded_sizes[number]
        block = next((block for block in blocks if block.size - block.used >= padded_size), None)
        if block is None:
            # The new block is as large as the remaining tensors fill, so that many tensors share the unusable rest.
            block = PinnedBlock(
                max(1 << (padded_size - 1).bit_length(), min(_LARGEST, 1 << (remaining.bit_length() - 1)))
            )
            blocks.append(block)
        remaining -= padded_size
        block.places.append((number, block.used))
        block.used += padded_size
    return blocks


def allocate_host_tensors(templates: Sequence[torch.Tensor], *, pinned_memory: bool) -> list[torch.Tensor]:
    """Allocate uninitialized, contiguous CPU memory for a copy of each tensor."""
    if not pinned_memory:
        return [torch.empty(template.shape, dtype=template.dtype) for template in templates]
    allocated: dict[int, torch.Tensor] = {}
    for block in pack_into_blocks([template.numel() * template.element_size() for template in templates]):
        memory = torch.empty(block.size, dtype=torch.uint8, pin_memory=True)
        for number, begin in block.places:
            template = templates[number]
            part = memory[begin : begin + template.numel() * template.element_size()]
            allocated[number] = part.view(template.dtype).view(template.shape)
    return [allocated[number] for number in range(len(templates))]


class CopyStreams:
    """One stream for copies from a device to host memory and one for copies back.

    Only CUDA has them. Other devices copy at once.
    """

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.outward = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self.inward = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]

    @contextmanager
    def copying_out(self) -> Iterator[torch.cuda.Stream]:
        """Queue the block's copies on the outward stream, after the work that is queued on the current stream."""
        assert self.outward is not None
        self.outward.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.outward):
            yield self.outward
