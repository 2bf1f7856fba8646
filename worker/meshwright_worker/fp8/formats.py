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
_LEAST = 1e-12
_TILE = 16
"""The hardware's products take sizes that are multiples of it."""


class Quantised(NamedTuple):
    """A matrix in fp8."""

    values: torch.Tensor
    """[rows, columns], fp8."""
    scale: torch.Tensor
    """fp32 [] for the whole matrix, or [rows, 1]: what `values` are multiplied by."""

    @property
    def transposed(self) -> Quantised:
        """The transpose; of a matrix with one scale alone."""
        return Quantised(self.values.t().contiguous(), self.scale)


def largest(x: torch.Tensor, *, rowwise: bool) -> torch.Tensor:
    """The largest absolute value, fp32: [] of the matrix, or [rows, 1] of each row."""
    return (x.abs().amax(dim=1, keepdim=True) if rowwise else x.abs().amax()).float()


def quantised(x: torch.Tensor, amax: torch.Tensor, form: torch.dtype) -> Quantised:
    """`x` [rows, columns] in fp8, such that `amax`, [] or [rows, 1], becomes the format's largest number."""
    limit = torch.finfo(form).max
    scale = amax.clamp(min=_LEAST) / limit
    return Quantised((x.float() / scale).clamp(-limit, limit).to(form), scale)


def product(a: Quantised, b: Quantised, form: torch.dtype, *, hardware: bool = False) -> torch.Tensor:
    """A [m, k] times the rows of b [n, k] -> [m, n] in `form`, by the `hardware` if it can and sizes allow it."""
    if hardware and a.values.is_cuda and fits_hardware(*a.values.shape, b.values.shape[0]):
        return scaled(a, b, form)
    return ((a.values.float() * a.scale) @ (b.values.float() * b.scale).t()).to(form)


def scaled(a: Quantised, b: Quantised, form: torch.dtype) -> torch.Tensor:
    """`product` by the hardware."""
    out = form if form in (torch.bfloat16, torch.float32) and not a.scale.ndim else torch.bfloat16
    result: torch.Tensor = torch._scaled_mm(
        a.values, b.values.t(), scale_a=a.scale, scale_b=b.scale.t() if b.scale.ndim else b.scale, out_dtype=out
    )
    return result.to(form)


def fits_hardware(*sizes: int) -> bool:
    """Whether the hardware's products take matrices of these sizes."""
    return not any(size % _TILE for size in sizes)


def hardware_multiplies() -> bool:
    """Whether this rank's GPU has products of fp8. To be asked outside of what is compiled."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
