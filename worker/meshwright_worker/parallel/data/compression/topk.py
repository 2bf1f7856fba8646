"""Only the largest elements of each bucket, with error feedback (Sparsified SGD with Memory, arXiv 1809.07599)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from meshwright_worker.distributed.collectives import all_gather_into
from meshwright_worker.parallel.data.compression.compressor import ErrorFeedback, Reduction


class TopK:
    """Every rank sends indices and values of its largest elements to all ranks, which sum them.

    Args:
        group: the replicas.
        density: share of a bucket's elements to send, at least one element.
    """

    def __init__(self, group: dist.ProcessGroup, density: float) -> None:
        self._group = group
        self._density = density
        self._feedback = ErrorFeedback()

    def start(self, bucket: int, flat: torch.Tensor, shapes: Sequence[torch.Size]) -> Reduction:
        """See `Compressor.start`."""
        corrected = self._feedback.add_to(bucket, flat)
        places = corrected.abs().topk(math.ceil(self._density * len(flat)), sorted=False).indices
        values = corrected[places]
        self._feedback.store(bucket, corrected.index_fill(0, places, 0.0))
        return _Gathered(self._group, places, values)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """See `Compressor.state_dict`."""
        return self._feedback.state_dict("left")

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """See `Compressor.load_state_dict`."""
        self._feedback.load_state_dict("left", state_dict)


class _Gathered:
    def __init__(self, group: dist.ProcessGroup, places: torch.Tensor, values: torch.Tensor) -> None:
        ranks = group.size()
        self._places = places.new_empty(ranks, len(places))
        self._values = values.new_empty(ranks, len(values))
        self._works = [
            all_gather_into(self._places, places, group, async_op=True),
            all_gather_into(self._values, values, group, async_op=True),
        ]

    def finish(self, flat: torch.Tensor) -> None:
        for work in self._works:
            if work is not None:
                work.wait()
        flat.zero_().index_add_(0, self._places.flatten(), self._values.flatten())
