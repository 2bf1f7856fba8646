"""Where an offloaded optimizer's moments are: in main memory, or in a file that only passes through it.

Both deal them out in buckets. The file (ZeRO-Infinity, arXiv 2104.07857) is mapped into memory; a thread copies the
next bucket out of it and the last one back into it while the one between is updated, so the main thread waits for no
disk that keeps up.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from meshwright_worker.memory.mmap_tensor import mmap_zeros
from meshwright_worker.memory.pinned_memory import allocate_host_tensors
from meshwright_worker.optimizers.optimizer import MOMENTS

Bucket = list[int]
"""Numbers of tensors."""
BucketMoments = list[list[torch.Tensor]]
"""By moment, one tensor for each of a bucket."""

_BUCKET_ELEMENTS = 16 * 1024 * 1024


class MomentState(Protocol):
    """Moments, and the way to get at those of a bucket."""

    buckets: list[Bucket]

    def prefetch(self, number: int) -> None:
        """Begin to bring a bucket's moments into main memory."""

    def get(self, number: int) -> BucketMoments:
        """A bucket's moments in main memory, to be changed in place."""

    def write_back(self, number: int) -> None:
        """The bucket is updated."""

    def moments(self, tensor: int) -> dict[str, torch.Tensor]:
        """The moments of one tensor by name, to be read or filled between steps."""


def buckets_of(tensors: Sequence[torch.Tensor]) -> list[Bucket]:
    """Tensors in order, in buckets of at most 16 Mi elements or one tensor."""
    buckets: list[Bucket] = []
    elements = 0
    for number, tensor in enumerate(tensors):
        if not buckets or elements + tensor.numel() > _BUCKET_ELEMENTS:
            buckets.append([])
            elements = 0
        buckets[-1].append(number)
        elements += tensor.numel()
    return buckets


class HostMomentState:
    """Moments in main memory (ZeRO-Offload, arXiv 2101.06840), page-locked where a GPU copies next to them."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, pinned: bool) -> None:
        self.buckets = buckets_of(tensors)
        moments = [moment.zero_() for moment in allocate_host_tensors([*tensors] * len(MOMENTS), pinned_memory=pinned)]
        self._moments = [moments[number * len(tensors) :][: len(tensors)] for number in range(len(MOMENTS))]

    def prefetch(self, number: int) -> None:
        """See `MomentState.prefetch`: they are there."""

    def get(self, number: int) -> BucketMoments:
        """See `MomentState.get`."""
        return [[tensors[index] for index in self.buckets[number]] for tensors in self._moments]

    def write_back(self, number: int) -> None:
        """See `MomentState.write_back`: they were changed in place."""

    def moments(self, tensor: int) -> dict[str, torch.Tensor]:
        """See `MomentState.moments`."""
        return {name: tensors[tensor] for name, tensors in zip(MOMENTS, self._moments, strict=True)}


class FileMomentState:
    """Moments in files of this rank's own under a directory, such as a local NVMe volume.

    Files live as long as the process: a restarted run loads its checkpoint.

    Raises:
        OSError: the directory cannot be made, or has no room.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], directory: str) -> None:
        self.buckets = buckets_of(tensors)
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
        # Two buckets are in main memory at a time: the one that is updated and the one that comes or goes.
        self._staged = [[torch.empty(largest, dtype=dtype) for _ in MOMENTS] for _ in range(2)]
        self._shapes = [tensor.shape for tensor in tensors]
        self._reads: dict[int, Future[None]] = {}
        self._write_back: Future[None] | None = None
        # One thread, so that a bucket is written back before the next one takes its place.
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
