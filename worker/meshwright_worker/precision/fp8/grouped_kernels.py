"""The hardware's grouped fp8 product: consecutive groups of rows, each with its own matrix."""

from __future__ import annotations

from functools import cache

import torch

from meshwright_worker.precision.fp8.quantize import FORWARD, QuantizedTensor

_TILE = 16
"""Rows of both factors must be multiples of this many bytes."""


def supports_grouped_kernel(a: QuantizedTensor, b: QuantizedTensor, dtype: torch.dtype) -> bool:
    """Return whether `scaled_grouped_mm` can multiply these, into `dtype`."""
    if not a.values.is_cuda or dtype is not torch.bfloat16 or not len(a.values):
        return False
    aligned = not any(size % _TILE for size in b.values.shape[1:])
    return aligned and a.values.dtype == b.values.dtype == FORWARD and _has_kernel(a.values.device)


def scaled_grouped_mm(a: QuantizedTensor, b: QuantizedTensor, counts: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of group g with the transposed matrix g, in bf16.

    Args:
        a: [rows, inputs], sorted by group, one scale per row [rows, 1].
        b: [groups, outputs, inputs], scales [groups, 1 or outputs, 1].
        counts: int64 [groups], number of rows per group.

    Returns:
        [rows, outputs].
    """
    groups, outputs, _ = b.values.shape
    # The private name is older than the public one and exists in all supported versions; it accepts only scales per
    # row.
    result: torch.Tensor = torch._scaled_grouped_mm(
        a.values,
        b.values.transpose(-2, -1),
        a.scale.squeeze(1).contiguous(),
        b.scale.squeeze(2).expand(groups, outputs).contiguous(),
        offs=counts.cumsum(0).to(torch.int32),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return result


@cache
def _has_kernel(device: torch.device) -> bool:
    """Try it on two small matrices: torch does not report which GPUs and builds support it."""
    one = torch.ones((), device=device)
    a = QuantizedTensor(torch.ones(32, _TILE, device=device).to(FORWARD), one.expand(32, 1))
    b = QuantizedTensor(torch.ones(2, _TILE, _TILE, device=device).to(FORWARD), one.expand(2, 1, 1))
    try:
        product = scaled_grouped_mm(a, b, torch.tensor([16, 16], device=device))
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False
    return bool((product == _TILE).all())
