"""Allocates pinned host memory, from and to which GPUs copy asynchronously, without waste.

torch rounds every pinned block up to a power of two, so that a tensor of 1.1 GiB takes 2 GiB. Here tensors share blocks
whose sizes are powers of two, and smaller tensors fill the rest of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

_ALIGNMENT = 512
"""In bytes; torch's blocks on GPUs begin at multiples of it."""

_LARGEST = 1 << 30
"""Maximum size of a block in bytes, unless one tensor needs more."""


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
