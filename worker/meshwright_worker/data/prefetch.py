"""Reads the next step's samples in a thread during the current step.

One thread does all the reading, so streams need no lock, and it is never more than one step ahead. An error while
reading is raised when the step that needs the samples begins, as it would be without the thread.
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
    """A replica's samples of one step."""

    numbers: Sequence[int]
    """The samples' numbers in the run."""
    samples: torch.Tensor
    """int64 [rows, length + 1]."""
    batch: Batch
    """On the CPU; in pinned memory if a GPU copies it asynchronously."""


class Prefetcher:
    """Reads by the number of a step's first sample.

    Args:
        read: returns the replica's samples of the step that begins with this sample; only called in the thread.
        device: the device that the batch is for.
    """

    def __init__(self, read: Callable[[int], StepSamples], device: torch.device) -> None:
        self._read = read
        self._device = device
        self._thread = ThreadPoolExecutor(1, "samples", initializer=self._begin)
        self._prefetched: tuple[int, Future[StepSamples]] | None = None

    def take(self, first: int, next_first: int | None) -> StepSamples:
        """Return the samples of the step that begins with sample `first`; start to read those of `next_first`, if
        given.
        """
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
        """Stop reading. A read in progress finishes and its result is dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        # Pinning memory uses a device context.
        use_device(self._device)

    def _read_step(self, first: int) -> StepSamples:
        read = self._read(first)
        return StepSamples(read.numbers, read.samples, pin_batch(read.batch, self._device))


def pin_batch(batch: Batch, device: torch.device) -> Batch:
    """Return the batch, in pinned memory if it is for a GPU: a copy from pageable memory is synchronous.

    Tokens and targets are views of the samples' rows. Pinned memory would keep their gaps, and a copy with gaps goes
    through pageable memory.
    """
    return batch.each(lambda tensor: tensor.contiguous().pin_memory()) if device.type == "cuda" else batch
