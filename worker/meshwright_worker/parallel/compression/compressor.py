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

    def memory(self) -> dict[str, torch.Tensor]:
        """What is remembered of the buckets seen so far, by name."""

    def recall(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Remember what `memory` said, in place of everything else."""


class Forgetful:
    """A compressor that leaves nothing out, or what it leaves out for good."""

    def memory(self) -> dict[str, torch.Tensor]:
        """See `Compressor.memory`."""
        return {}

    def recall(self, memory: Mapping[str, torch.Tensor]) -> None:
        """See `Compressor.recall`."""


class Whole(Forgetful):
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


class Feedback:
    """What was left out of each bucket, to be added to its next gradient (error feedback, arXiv 1901.09847)."""

    def __init__(self) -> None:
        self._left: dict[int, torch.Tensor] = {}

    def add_to(self, bucket: int, values: torch.Tensor) -> torch.Tensor:
        """The values and what was left out of them before, as a new tensor."""
        left = self._left.get(bucket)
        return values.clone() if left is None else values + left

    def keep(self, bucket: int, left: torch.Tensor) -> None:
        """Remember what is left out now."""
        self._left[bucket] = left

    def memory(self, name: str) -> dict[str, torch.Tensor]:
        """See `Compressor.memory`; `name` tells it from other feedback of the same compressor."""
        return {f"{name}.{bucket}": left for bucket, left in self._left.items()}

    def recall(self, name: str, memory: Mapping[str, torch.Tensor]) -> None:
        """See `Compressor.recall`."""
        own = f"{name}."
        self._left = {int(key.removeprefix(own)): left for key, left in memory.items() if key.startswith(own)}
