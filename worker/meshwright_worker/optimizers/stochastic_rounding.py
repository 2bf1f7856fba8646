"""Stochastic rounding to bf16: rounds up or down with the probability that makes the result unbiased.

Rounding to nearest drops an update far smaller than the distance of two bf16 numbers. With stochastic rounding it
counts in the mean (Zamirai et al., "Revisiting BFloat16 Training", arXiv 2010.06192).
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
    """A part of a parameter as a matrix, and its position among the parameter's elements, counted row by row."""

    index: tuple[int, ...]
    """Its index in the leading dimensions of the local part."""
    offset: int
    """Index of its first element."""
    stride: int
    """Elements of the full parameter from one row to the next."""


def matrices(box: tuple[slice, ...], shape: tuple[int, ...]) -> list[Matrix]:
    """Return the part `box` of a tensor of `shape` as the smallest number of matrices; full dimensions become columns.

    A vector is one row. Reshape the local part to [*leading, rows, columns]; each matrix is one index of the leading
    dimensions.
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
    """int64 [rows, columns]: the index of each element of a matrix in the full parameter."""
    along = torch.arange(rows, device=device).unsqueeze(-1) * stride + torch.arange(columns, device=device)
    return along + offset


def round_to_bf16(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round fp32 `x` to bf16, each element by the lowest 16 of its random bits, int64. Non-finite elements stay
    non-finite.
    """
    pattern = x.float().contiguous().view(torch.int32)
    noise = (bits & _LOW_HALF).to(torch.int32)
    # The upper half of an fp32 number is a bf16 number: a number added to the lower half carries over or is cut off.
    rounded = ((pattern + noise) & ~_LOW_HALF).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)
