"""Quantization to e4m3 and e5m2, and the product of two quantized matrices.

A number is divided by a scale, clamped to the format's range and rounded. There is one scale per tensor, or one per row
of each factor (sums run along rows). Without hardware support the product is emulated: the same quantized numbers,
multiplied in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
"""Format of inputs and weights; format of gradients, which need range more than precision (arXiv 2209.05433)."""
_MIN_AMAX = 1e-12
TILE = 16
"""The hardware's products require sizes that are multiples of this."""


class QuantizedTensor(NamedTuple):
    """A matrix in fp8."""

    values: torch.Tensor
    """[rows, columns], fp8."""
    scale: torch.Tensor
    """fp32 [] for the entire matrix, or [rows, 1]: the factor of `values`."""

    @property
    def transposed(self) -> QuantizedTensor:
        """Return the transpose; only for a matrix with one scale."""
        return QuantizedTensor(self.values.t().contiguous(), self.scale)


def absolute_max(x: torch.Tensor, *, rowwise: bool) -> torch.Tensor:
    """Return the largest absolute value, fp32: [] of the matrix, or [rows, 1] of each row."""
    return (x.abs().amax(dim=1, keepdim=True) if rowwise else x.abs().amax()).float()


def quantize(x: torch.Tensor, amax: torch.Tensor, dtype: torch.dtype) -> QuantizedTensor:
    """Quantize `x` [rows, columns] to fp8 such that `amax`, [] or [rows, 1], maps to the format's largest number."""
    scale = scale_for(amax, dtype)
    return QuantizedTensor(quantize_by(x, scale, dtype), scale)


def scale_for(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the scale that maps `amax` to the largest number of `dtype`."""
    return amax.clamp(min=_MIN_AMAX) / torch.finfo(dtype).max


def quantize_by(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `x` divided by `scale`, in `dtype`; larger numbers are clamped."""
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype)


def product(
    a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, *, native: bool = False, fast: bool = False
) -> torch.Tensor:
    """Multiply a [m, k] with the rows of b [n, k] -> [m, n] in `dtype`, with the hardware's product if it supports the
    sizes; for `fast` see `scaled_mm`.
    """
    if native and a.values.is_cuda and is_fp8_aligned(*a.values.shape, b.values.shape[0]):
        return scaled_mm(a, b, dtype, fast=fast)
    return _cast((a.values.float() * a.scale) @ (b.values.float() * b.scale).t(), dtype)


def scaled_mm(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype, *, fast: bool = False) -> torch.Tensor:
    """`product` by the hardware.

    Hopper adds up fp8 products with about 14 bits. Unless it is `fast`, partial sums go into fp32 registers every 128
    products (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). Gradients need that, forward passes do not.
    """
    out = dtype if dtype in (torch.bfloat16, torch.float32) and not a.scale.ndim else torch.bfloat16
    result: torch.Tensor = torch._scaled_mm(
        a.values,
        b.values.t(),
        scale_a=a.scale,
        scale_b=b.scale.t() if b.scale.ndim else b.scale,
        out_dtype=out,
        use_fast_accum=fast,
    )
    return _cast(result, dtype)


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # With a cast that changes nothing at the end of an autograd function, compiled code of torch 2.11 takes its result
    # for a constant: nothing behind it gets a gradient.
    return x if x.dtype == dtype else x.to(dtype)


def is_fp8_aligned(*sizes: int) -> bool:
    """Return whether the hardware's products support matrices of these sizes."""
    return not any(size % TILE for size in sizes)


def has_fp8_matmul() -> bool:
    """Return whether this rank's GPU has fp8 products. Call it outside of compiled code."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
