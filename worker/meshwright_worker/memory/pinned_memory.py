"""Page-locked main memory, which GPUs copy from and to beside their work, without waste.

torch rounds every page-locked block up to a power of two, so that a tensor of 1.1 GiB takes 2. Here tensors share
blocks whose sizes are powers of two, and smaller ones fill what larger ones leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

_ALIGNMENT = 512
"""Bytes; torch's own blocks on GPUs begin at multiples of it."""

_LARGEST = 1 << 30
"""Bytes of a block, unless one tensor needs more."""


@dataclass
class PinnedBlock:
    """Memory for several tensors."""

    size: int
    """Bytes, a power of two."""
    used: int = 0
    places: list[tuple[int, int]] = field(default_factory=list)
    """(number of a tensor, byte at which it begins)."""


def pack_into_blocks(sizes: Sequence[int]) -> list[PinnedBlock]:
    """Blocks for tensors of so many bytes: the largest first, each into the first block that has room for it."""
    blocks: list[PinnedBlock] = []
    padded_sizes = [-(-max(1, size) // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    remaining = sum(padded_sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        padded_size = padded_sizes[number]
        block = next((block for block in blocks if block.size - block.used >= padded_size), None)
        if block is None:
            # As large as what is left fills, so that many tensors share what none of them can use.
            block = PinnedBlock(
                max(1 << (padded_size - 1).bit_length(), min(_LARGEST, 1 << (remaining.bit_length() - 1)))
            )
            blocks.append(block)
        remaining -= padded_size
        block.places.append((number, block.used))
        block.used += padded_size
    return blocks


def allocate_host_tensors(templates: Sequence[torch.Tensor], *, pinned_memory: bool) -> list[torch.Tensor]:
    """Memory on the CPU for a copy of each tensor; contiguous, nothing in it."""
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
