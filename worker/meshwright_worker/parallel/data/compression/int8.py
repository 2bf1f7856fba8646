"""Gradients in 8 bits with a scale, summed in two phases as in 1-bit Adam (arXiv 2102.02888).

1. each rank quantizes its gradient, split into one part per rank, and sends every part to its owner (all-to-all);
2. the owner sums the parts that it received, quantizes the sum and sends it to all (all-gather).

Numbers of different scales are never added as integers. A rank sends 2 (N - 1) / N bytes per element: a quarter of
fp32's ring all-reduce. Both rounding errors are fed back into the next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.nn import functional as F

from meshwright_worker.distributed.collectives import all_gather_into
from meshwright_worker.parallel.data.compression.compressor import ErrorFeedback, Reduction

_LARGEST = 127


def quantize(parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, length] -> int8 [n, length] and scales [n, 1]: the largest element of each part maps to 127."""
    scales = parts.abs().amax(dim=1, keepdim=True) / _LARGEST
    return (parts / scales.where(scales > 0, 1.0)).round().to(torch.int8), scales


class Int8:
    """Two rounds of quantized numbers, each with error feedback."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._sent, self._summed = ErrorFeedback(), ErrorFeedback()

    def start(self, bucket: int, flat: torch.Tensor, shapes: Sequence[torch.Size]) -> Reduction:
        """See `Compressor.start`."""
        ranks = self._group.size()
        # A scale rounded to bf16 may be too small, and the largest number would then overflow 8 bits.
        wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
        padded = F.pad(wide, (0, -len(flat) % ranks))
        parts = self._sent.add_to(bucket, padded).view(ranks, -1)
        numbers, scales = quantize(parts)
        self._sent.store(bucket, (parts - numbers * scales).flatten())
        received_numbers, received_scales = torch.empty_like(numbers), torch.empty_like(scales)
        dist.all_to_all_single(received_scales, scales, group=self._group)
        work = dist.all_to_all_single(received_numbers, numbers, group=self._group, async_op=True)
        return _Sum(self._group, self._summed, bucket, received_numbers, received_scales, work)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """See `Compressor.state_dict`."""
        return self._sent.state_dict("sent") | self._summed.state_dict("summed")

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """See `Compressor.load_state_dict`."""
        self._sent.load_state_dict("sent", state_dict)
        self._summed.load_state_dict("summed", state_dict)


class _Sum:
    def __init__(
        self,
        group: dist.ProcessGroup,
        feedback: ErrorFeedback,
        bucket: int,
        numbers: torch.Tensor,
        scales: torch.Tensor,
        work: dist.Work,
    ) -> None:
        self._group = group
        self._feedback = feedback
        self._bucket = bucket
        self._numbers = numbers
        self._scales = scales
        self._work = work

    def finish(self, flat: torch.Tensor) -> None:
        self._work.wait()
        own = self._feedback.add_to(self._bucket, (self._numbers * self._scales).sum(dim=0))
        numbers, scale = quantize(own.unsqueeze(0))
        self._feedback.store(self._bucket, own - (numbers * scale).squeeze(0))
        ranks = self._group.size()
        all_numbers = numbers.new_empty(ranks, numbers.shape[1])
        all_scales = scale.new_empty(ranks, 1)
        all_gather_into(all_numbers, numbers, self._group)
        all_gather_into(all_scales, scale, self._group)
        flat.copy_((all_numbers * all_scales).flatten()[: len(flat)])
