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
class Block:
    """Memory for several tensors."""

    size: int
    """Bytes, a power of two."""
    used: int = 0
    places: list[tuple[int, int]] = field(default_factory=list)
    """(number of a tensor, byte at which it begins)."""


def packed(sizes: Sequence[int]) -> list[Block]:
    """Blocks for tensors of so many bytes: the largest first, each into the first block that has room for it."""
    blocks: list[Block] = []
    rooms = [-(-max(1, size) // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    left = sum(rooms)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        room = rooms[number]
        block = next((block for block in blocks if block.size - block.used >= room), None)
        if block is None:
            # As large as what is left fills, so that many tensors share what none of them can use.
            block = Block(max(1 << (room - 1).bit_length(), min(_LARGEST, 1 << (left.bit_length() - 1))))
            blocks.append(block)
        left -= room
        block.places.append((number, block.used))
        block.used += room
    return blocks


def in_main_memory(likes: Sequence[torch.Tensor], *, page_locked: bool) -> list[torch.Tensor]:
    """Memory on the CPU for a copy of each tensor; contiguous, nothing in it."""
    if not page_locked:
        return [torch.empty(like.shape, dtype=like.dtype) for like in likes]
    found: dict[int, torch.Tensor] = {}
    for block in packed([like.numel() * like.element_size() for like in likes]):
        memory = torch.empty(block.size, dtype=torch.uint8, pin_memory=True)
        for number, begin in block.places:
            like = likes[number]
            part = memory[begin : begin + like.numel() * like.element_size()]
            found[number] = part.view(like.dtype).view(like.shape)
    return [found[number] for number in range(len(likes))]
