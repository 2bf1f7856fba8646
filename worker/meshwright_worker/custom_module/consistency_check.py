"""Checks that replicated tensors are the same on all ranks: no other check would detect a difference."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def first_mismatch(tensors: Mapping[str, torch.Tensor], device: torch.device) -> str | None:
    """Return the name of the first tensor that is not the same on every rank, bit for bit. Collective over all ranks.

    Every rank has the same names, and tensors stay on the device. Sums of bits are compared, so a permutation of the
    same bits is not detected.
    """
    if not tensors or dist.get_world_size() == 1:
        return None
    sums = torch.stack([_sum_of_bits(tensor).to(device) for tensor in tensors.values()])
    extremes = torch.cat((sums, -sums))
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    highest, lowest = extremes.chunk(2)
    return next((name for name, same in zip(tensors, (highest == -lowest).tolist(), strict=True) if not same), None)


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    size = tensor.element_size()
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.detach().contiguous().view(_INTEGERS[min(size, plain.element_size())]).sum(dtype=torch.int64)
