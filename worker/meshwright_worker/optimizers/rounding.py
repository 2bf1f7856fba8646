"""Stochastic rounding to bf16: up or down with the probability that makes it right on average.

An update far smaller than the distance of two bf16 numbers is lost by rounding to the nearest; rounded stochastically
it counts in the mean (Zamirai et al., "Revisiting BFloat16 Training", arXiv 2010.06192).
"""

from __future__ import annotations

import torch

from meshwright_worker.counters import mixed

_LOST = 0xFFFF


def places(box: tuple[slice, ...], shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int64, of the box's shape: the number of each element of a part in the whole tensor, row by row.

    Args:
        box: where in the whole the part lies.
        shape: of the whole.
        device: where to make it.
    """
    numbers = torch.zeros((), dtype=torch.int64, device=device)
    for extent, size in zip(box, shape, strict=True):
        numbers = numbers.unsqueeze(-1) * size + torch.arange(extent.start, extent.stop, device=device)
    return numbers


def round_to_bf16(x: torch.Tensor, places: torch.Tensor, salt: int) -> torch.Tensor:
    """fp32 `x` in bf16, each element rounded by the bits of its place and `salt`. What is not finite stays so."""
    bits = x.float().contiguous().view(torch.int32)
    noise = (mixed(places, salt) & _LOST).to(torch.int32)
    # The upper half of an fp32 number is a bf16 number: what is added to the lower half carries, or is cut off.
    rounded = ((bits + noise) & ~_LOST).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)
