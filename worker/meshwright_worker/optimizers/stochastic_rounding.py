"""Stochastic rounding to bf16: up or down with the probability that makes it right on average.

An update far smaller than the distance of two bf16 numbers is lost by rounding to the nearest; rounded stochastically
it counts in the mean (Zamirai et al., "Revisiting BFloat16 Training", arXiv 2010.06192).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from operator import mul

import torch

_LOW_HALF = 0xFFFF


@dataclass(frozen=True, slots=True)
class Matrix:
    """A part of a parameter as a matrix, and where it lies among the parameter's elements, counted row by row."""

    index: tuple[int, ...]
    """Which one of those that the local part's leading dimensions count."""
    offset: int
    """Number of its first element."""
    stride: int
    """Elements of the whole from one row to the next."""


def matrices(box: tuple[slice, ...], shape: tuple[int, ...]) -> list[Matrix]:
    """The part of a whole of `shape` that `box` cuts out, as few matrices; dimensions that are whole become columns.

    A vector is one row. The local part has to be reshaped to [*leading, rows, columns], of which each matrix is one.
    """
    spans, sizes = [(extent.start, extent.stop) for extent in box], list(shape)
    while len(sizes) > 2 and spans[-1] == (0, sizes[-1]):
        inner = sizes.pop()
        spans.pop()
        spans[-1] = (spans[-1][0] * inner, spans[-1][1] * inner)
        sizes[-1] *= inner
    strides = [math.prod(sizes[place + 1 :]) for place in range(len(sizes))]
    leading = [range(stop - start) for start, stop in spans[:-2]]
    first = sum(start * stride for (start, _), stride in zip(spans, strides, strict=True))
    return [
        Matrix(index, first + sum(map(mul, index, strides)), strides[-2] if len(strides) > 1 else 1)
        for index in product(*leading)
    ]


def element_numbers(
    rows: int, columns: int, stride: int, offset: int | torch.Tensor, device: torch.device
) -> torch.Tensor:
    """int64 [rows, columns]: the number of each element of a matrix among those of the whole."""
    along = torch.arange(rows, device=device).unsqueeze(-1) * stride + torch.arange(columns, device=device)
    return along + offset


def round_to_bf16(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """fp32 `x` in bf16, each element rounded by the lowest 16 of its random bits, int64. Not-finite ones stay so."""
    pattern = x.float().contiguous().view(torch.int32)
    noise = (bits & _LOW_HALF).to(torch.int32)
    # The upper half of an fp32 number is a bf16 number: what is added to the lower half carries, or is cut off.
    rounded = ((pattern + noise) & ~_LOW_HALF).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)
