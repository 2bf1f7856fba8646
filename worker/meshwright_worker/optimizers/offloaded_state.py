"""Storage of an offloaded optimizer's moments: in host memory, or in a file that is paged through it.

Both provide the moments in buckets. The file (ZeRO-Infinity, arXiv 2104.07857) is mapped into memory. A thread copies
the next bucket out of it and the previous one back into it while the current one is updated, so the main thread does
not wait for a disk that is fast enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from meshwright_worker.memory.host_memory import allocate_host_tensors, mmap_zeros
from meshwright_worker.optimizers.optimizer import MOMENTS
from meshwright_worker.parallel.data.gradient_buckets import split_into_buckets

Bucket = list[int]
"""Indices of tensors."""
BucketMoments = list[list[torch.Tensor]]
"""By moment, one tensor for each parameter of a bucket."""

_BUCKET_ELEMENTS = 16 * 1024 * 1024


class MomentState(Protocol):
    """Stores the moments and provides them bucket by bucket."""

    buckets: list[Bucket]

    def prefetch(self, number: int) -> None:
        """Start to copy a bucket's moments to host memory."""

    def get(self, number: int) -> BucketMoments:
        """Return a bucket's moments in host memory, to be changed in place."""

    def write_back(self, number: int) -> None:
        """Store the bucket's updated moments."""

    def moments(self, tensor: int) -> dict[str, torch.Tensor]:
        """Return the moments of one tensor by name, to read or fill between steps."""


def _buckets_of(tensors: Sequence[torch.Tensor]) -> list[Bucket]:
    """Split the tensors' indices, in order, into buckets of at most 16 Mi elements or one tensor."""
    return split_into_buckets(range(len(tensors)), lambda number: tensors[number].numel(), _BUCKET_ELEMENTS)


class HostMomentState:
    """Moments in host memory (ZeRO-Offload, arXiv 2101.06840), pinned if a GPU copies them asynchronously."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, pinned: bool) -> None:
        self.buckets = _buckets_of(tensors)
        moments = [moment.zero_() for moment in allocate_host_tensors([*tensors] * len(MOMENTS), pinned_memory=pinned)]
        self._moments = [moments[number * len(tensors) :][: len(tensors)] for number in range(len(MOMENTS))]

    def prefetch(self, number: int) -> None:
        """See `MomentState.prefetch`: does nothing, they are in host memory."""

    def get(self, number: int) -> BucketMoments:
        """See `MomentState.get`."""
        return [[tensors[index] for index in self.buckets[number]] for tensors in self._moments]

    def write_back(self, number: int) -> None:
        """See `MomentState.write_back`: does nothing, they were changed in place."""

    def moments(self, tensor: int) -> dict[str, torch.Tensor]:
        """See `MomentState.moments`."""
        return {name: tensors[tensor] for name, tensors in zip(MOMENTS, self._moments, strict=True)}


class FileMomentState:
    """Moments in this rank's files under a directory, such as a local NVMe volume.

    The files are deleted with the process: a restarted run loads its checkpoint.

    Raises:
        OSError: the directory cannot be created, or has no free space.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], directory: str) -> None:
        self.buckets = _buckets_of(tensors)
        sizes = [tensor.numel() for tensor in tensors]
        dtype = tensors[0].dtype
        files = [
            mmap_zeros(directory, sum(sizes), dtype, f"{name}-", "training.optimizer.offloadPath") for name in MOMENTS
        ]
        self._files = [
            [part.view(tensor.shape) for part, tensor in zip(torch.split(file, sizes), tensors, strict=True)]
            for file in files
        ]
        largest = max(sum(tensors[index].numel() for index in bucket) for bucket in self.buckets)
        # Two buckets are in host memory at a time: the one being updated and the one being copied.
        self._staged = [[torch.empty(largest, dtype=dtype) for _ in MOMENTS] for _ in range(2)]
        self._shapes = [tensor.shape for tensor in tensors]
        self._reads: dict[int, Future[None]] = {}
        self._write_back: Future[None] | None = None
        # One thread, so that a bucket is written back before the next one takes its memory.
        self._thread = ThreadPoolExecutor(1, "optimizer-state")

    def prefetch(self, number: int) -> None:
        """See `MomentState.prefetch`."""
        if number not in self._reads and number < len(self.buckets):
            self._reads[number] = self._thread.submit(self._copy, number, inward=True)

    def get(self, number: int) -> BucketMoments:
        """See `MomentState.get`."""
        self.prefetch(number)
        self._reads.pop(number).result()
        return self._views(number)

    def write_back(self, number: int) -> None:
        """See `MomentState.write_back`."""
        self._write_back = self._thread.submit(self._copy, number, inward=False)

    def moments(self, tensor: int) -> dict[str, torch.Tensor]:
        """See `MomentState.moments`."""
        if self._write_back is not None:
            self._write_back.result()
        return {name: tensors[tensor] for name, tensors in zip(MOMENTS, self._files, strict=True)}

    def _copy(self, number: int, *, inward: bool) -> None:
        for views, stored in zip(self._views(number), self._files, strict=True):
            for view, index in zip(views, self.buckets[number], strict=True):
                if inward:
                    view.copy_(stored[index])
                else:
                    stored[index].copy_(view)

    def _views(self, number: int) -> BucketMoments:
        sizes = [self._shapes[index].numel() for index in self.buckets[number]]
        shapes = [self._shapes[index] for index in self.buckets[number]]
        return [
            [part.view(shape) for part, shape in zip(torch.split(staged[: sum(sizes)], sizes), shapes, strict=True)]
            for staged in self._staged[number % 2]
        ]
