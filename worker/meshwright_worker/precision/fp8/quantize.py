"""Quantising to e4m3 and e5m2, and the product of two quantised matrices.

A number is divided by a scale, clamped to the format's range and rounded. Scales are one a tensor, or one a row of each
factor (a row is what a sum runs along). Where the hardware has no such product, it is emulated: the same quantised
numbers, multiplied in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
"""Inputs and weights; gradients, which need the range more than the digits (arXiv 2209.05433)."""
_MIN_AMAX = 1e-12
_TILE = 16
"""The hardware's products take sizes that are multiples of it."""


class QuantizedTensor(NamedTuple):
    """A matrix in fp8."""

    values: torch.Tensor
    """[rows, columns], fp8."""
    scale: torch.Tensor
    """fp32 [] for the whole matrix, or [rows, 1]: what `values` are multiplied by."""

    @property
    def transposed(self) -> QuantizedTensor:
        """The transpose; of a matrix with one scale alone."""
        return QuantizedTensor(self.values.t().contiguous(), self.scale)


def absolute_max(x: torch.Tensor, *, rowwise: bool) -> torch.Tensor:
    """The largest absolute value, fp32: [] of the matrix, or [rows, 1] of each row."""
    return (x.abs().amax(dim=1, keepdim=True) if rowwise else x.abs().amax()).float()


def quantize(x: torch.Tensor, amax: torch.Tensor, dtype: torch.dtype) -> QuantizedTensor:
    """`x` [rows, columns] in fp8, such that `amax`, [] or [rows, 1], becomes the format's largest number."""
    limit = torch.finfo(dtype).max
    scale = amax.clamp(min=_MIN_AMAX) / limit
    return QuantizedTensor((x.float() / scale).clamp(-limit, limit).to(dtype), scale)


def product(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, *, native: bool = False) -> torch.Tensor:
    """A [m, k] times the rows of b [n, k] -> [m, n] in `dtype`, by the `native` if it can and sizes allow it."""
    if native and a.values.is_cuda and is_fp8_aligned(*a.values.shape, b.values.shape[0]):
        return scaled_mm(a, b, dtype)
    return ((a.values.float() * a.scale) @ (b.values.float() * b.scale).t()).to(dtype)


def scaled_mm(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
    """`product` by the hardware."""
    out = dtype if dtype in (torch.bfloat16, torch.float32) and not a.scale.ndim else torch.bfloat16
    result: torch.Tensor = torch._scaled_mm(
        a.values, b.values.t(), scale_a=a.scale, scale_b=b.scale.t() if b.scale.ndim else b.scale, out_dtype=out
    )
    return result.to(dtype)


def is_fp8_aligned(*sizes: int) -> bool:
    """Whether the hardware's products take matrices of these sizes."""
    return not any(size % _TILE for size in sizes)


def has_fp8_matmul() -> bool:
    """Whether this rank's GPU has products of fp8. To be asked outside of what is compiled."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
