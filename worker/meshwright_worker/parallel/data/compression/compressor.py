"""What every way of summing a bucket over replicas offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist


class Reduction(Protocol):
    """The sum of one bucket, under way."""

    def finish(self, flat: torch.Tensor) -> None:
        """Wait, and put the sum over replicas in `flat`, the bucket's gradients. Collective."""


class Compressor(Protocol):
    """Starts sums, and remembers what it left out."""

    def start(self, bucket: int, flat: torch.Tensor, shapes: Sequence[torch.Size]) -> Reduction:
        """Begin to sum a bucket over replicas.

        Args:
            bucket: its index, by which the compressor remembers.
            flat: its gradients one after the other, [elements]; belongs to the reduction until it is finished.
            shapes: of those gradients.
        """

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What is remembered of the buckets seen so far, by name."""

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Remember what `state_dict` said, in place of everything else."""


class StatelessCompressor:
    """A compressor that leaves nothing out, or what it leaves out for good."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """See `Compressor.state_dict`."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """See `Compressor.load_state_dict`."""


class NoCompression(StatelessCompressor):
    """Sends everything: one all-reduce."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def start(self, bucket: int, flat: torch.Tensor, shapes: Sequence[torch.Size]) -> Reduction:
        """See `Compressor.start`."""
        return _InPlace(dist.all_reduce(flat, group=self._group, async_op=True))


class _InPlace:
    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def finish(self, flat: torch.Tensor) -> None:
        self._work.wait()


class ErrorFeedback:
    """What was left out of each bucket, to be added to its next gradient (error feedback, arXiv 1901.09847)."""

    def __init__(self) -> None:
        self._residuals: dict[int, torch.Tensor] = {}

    def add_to(self, bucket: int, values: torch.Tensor) -> torch.Tensor:
        """The values and what was left out of them before, as a new tensor."""
        residual = self._residuals.get(bucket)
        return values.clone() if residual is None else values + residual

    def store(self, bucket: int, residual: torch.Tensor) -> None:
        """Remember what is left out now."""
        self._residuals[bucket] = residual

    def state_dict(self, name: str) -> dict[str, torch.Tensor]:
        """See `Compressor.state_dict`; `name` tells it from other feedback of the same compressor."""
        return {f"{name}.{bucket}": residual for bucket, residual in self._residuals.items()}

    def load_state_dict(self, name: str, state_dict: Mapping[str, torch.Tensor]) -> None:
        """See `Compressor.load_state_dict`."""
        own = f"{name}."
        self._residuals = {
            int(key.removeprefix(own)): residual for key, residual in state_dict.items() if key.startswith(own)
        }
