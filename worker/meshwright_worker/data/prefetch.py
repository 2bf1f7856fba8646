"""The next step's samples, read in a thread while the present step is trained on.

One thread does all the reading, so streams need no lock, and it never is more than one step ahead. What reading raises
is raised when the step that needs it begins, as it would be without the thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from meshwright_worker.data.batch import Batch
from meshwright_worker.distributed.device import use_device


@dataclass(frozen=True, slots=True)
class StepSamples:
    """What a replica trains on in one step."""

    numbers: Sequence[int]
    """Of the samples in the run."""
    samples: torch.Tensor
    """int64 [rows, length + 1]."""
    batch: Batch
    """On the CPU; page-locked where a GPU copies it beside its work."""


class Prefetcher:
    """Reads by the number of a step's first sample.

    Args:
        read: gives what the replica trains on in the step that begins with this sample; runs in the thread alone.
        device: what it is for.
    """

    def __init__(self, read: Callable[[int], StepSamples], device: torch.device) -> None:
        self._read = read
        self._device = device
        self._thread = ThreadPoolExecutor(1, "samples", initializer=self._begin)
        self._prefetched: tuple[int, Future[StepSamples]] | None = None

    def take(self, first: int, next_first: int | None) -> StepSamples:
        """The samples of the step that begins with sample `first`; begins to read those of `next_first`, if any."""
        prefetched = self._prefetched
        future = (
            prefetched[1]
            if prefetched is not None and prefetched[0] == first
            else self._thread.submit(self._read_step, first)
        )
        self._prefetched = None
        read = future.result()
        if next_first is not None:
            self._prefetched = next_first, self._thread.submit(self._read_step, next_first)
        return read

    def close(self) -> None:
        """Read no more. What is being read is dropped when it is there."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        # Page-locking goes through a device's context.
        use_device(self._device)

    def _read_step(self, first: int) -> StepSamples:
        read = self._read(first)
        return StepSamples(read.numbers, read.samples, pin_batch(read.batch, self._device))


def pin_batch(batch: Batch, device: torch.device) -> Batch:
    """The batch, page-locked if it is for a GPU: a copy from other memory waits for the GPU's work and for itself."""
    return batch.each(torch.Tensor.pin_memory) if device.type == "cuda" else batch
