"""Gradients summed in fp16 or bf16: half the bytes of fp32, one rounding per rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from meshwright_worker.parallel.data.compression.compressor import Reduction, StatelessCompressor

_TOP = 14
"""fp16 ends below 2^16: the largest sum is scaled to between 2^13 and 2^14."""
_MOST = 126


class HalfPrecision(StatelessCompressor):
    """Rounds to `dtype` and all-reduces the result.

    fp16 has few exponents, and a mean gradient may be below all of them. The ranks first agree on a power of two that
    scales the bucket's largest element up: one more all-reduce, of a single number.
    """

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        self._group = group
        self._dtype = dtype

    def start(self, bucket: int, flat: torch.Tensor, shapes: Sequence[torch.Size]) -> Reduction:
        """See `Compressor.start`."""
        scale = self._scale(flat) if self._dtype == torch.float16 else None
        low = (flat if scale is None else flat * scale).to(self._dtype)
        return _Rounded(low, scale, dist.all_reduce(low, group=self._group, async_op=True))

    def _scale(self, flat: torch.Tensor) -> torch.Tensor:
        largest = flat.abs().amax()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        _, exponent = torch.frexp(largest * self._group.size())
        # Keep the power of two within fp32's range if all elements are close to 0.
        return torch.ldexp(torch.ones_like(largest), (_TOP - exponent).clamp(max=_MOST))


class _Rounded:
    def __init__(self, low: torch.Tensor, scale: torch.Tensor | None, work: dist.Work) -> None:
        self._low = low
        self._scale = scale
        self._work = work

    def finish(self, flat: torch.Tensor) -> None:
        self._work.wait()
        flat.copy_(self._low)
        if self._scale is not None:
            flat.div_(self._scale)
