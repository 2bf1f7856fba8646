"""The interface of compressors, which sum a bucket over replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist


class Reduction(Protocol):
    """A pending sum of one bucket."""

    def finish(self, flat: torch.Tensor) -> None:
        """Wait, and write the sum over replicas to `flat`, the bucket's gradients. Collective."""


class Compressor(Protocol):
    """Starts sums, and stores the residual: what compression left out."""

    def start(self, bucket: int, flat: torch.Tensor, shapes: Sequence[torch.Size]) -> Reduction:
        """Start to sum a bucket over replicas.

        Args:
            bucket: its index, the key of its residual.
            flat: its gradients one after the other, [elements]; used by the reduction until it is finished.
            shapes: of those gradients.
        """

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state of all buckets seen so far, by name."""

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Replace the entire state by what `state_dict` returned."""


class StatelessCompressor:
    """A compressor without state: it leaves nothing out, or drops what it leaves out."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """See `Compressor.state_dict`."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """See `Compressor.load_state_dict`."""


class NoCompression(StatelessCompressor):
    """Sends all gradients in one all-reduce."""

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
    """Stores each bucket's residual and adds it to the bucket's next gradient (error feedback, arXiv 1901.09847)."""

    def __init__(self) -> None:
        self._residuals: dict[int, torch.Tensor] = {}

    def add_to(self, bucket: int, values: torch.Tensor) -> torch.Tensor:
        """Return the values plus the stored residual, as a new tensor."""
        residual = self._residuals.get(bucket)
        return values.clone() if residual is None else values + residual

    def store(self, bucket: int, residual: torch.Tensor) -> None:
        """Store the new residual."""
        self._residuals[bucket] = residual

    def state_dict(self, name: str) -> dict[str, torch.Tensor]:
        """See `Compressor.state_dict`; `name` distinguishes several residuals of one compressor."""
        return {f"{name}.{bucket}": residual for bucket, residual in self._residuals.items()}

    def load_state_dict(self, name: str, state_dict: Mapping[str, torch.Tensor]) -> None:
        """See `Compressor.load_state_dict`."""
        own = f"{name}."
        self._residuals = {
            int(key.removeprefix(own)): residual for key, residual in state_dict.items() if key.startswith(own)
        }
