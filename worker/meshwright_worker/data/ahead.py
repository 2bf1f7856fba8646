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
from meshwright_worker.device import use


@dataclass(frozen=True, slots=True)
class Read:
    """What a replica trains on in one step."""

    numbers: Sequence[int]
    """Of the samples in the run."""
    samples: torch.Tensor
    """int64 [rows, length + 1]."""
    batch: Batch
    """On the CPU; page-locked where a GPU copies it beside its work."""


class ReadAhead:
    """Reads by the number of a step's first sample.

    Args:
        read: gives what the replica trains on in the step that begins with this sample; runs in the thread alone.
        device: what it is for.
    """

    def __init__(self, read: Callable[[int], Read], device: torch.device) -> None:
        self._read = read
        self._device = device
        self._thread = ThreadPoolExecutor(1, "samples", initializer=self._begin)
        self._coming: tuple[int, Future[Read]] | None = None

    def take(self, first: int, following: int | None) -> Read:
        """The samples of the step that begins with sample `first`; begins to read those of `following`, if any."""
        coming = self._coming
        future = coming[1] if coming is not None and coming[0] == first else self._thread.submit(self._one, first)
        self._coming = None
        read = future.result()
        if following is not None:
            self._coming = following, self._thread.submit(self._one, following)
        return read

    def close(self) -> None:
        """Read no more. What is being read is dropped when it is there."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        # Page-locking goes through a device's context.
        use(self._device)

    def _one(self, first: int) -> Read:
        read = self._read(first)
        return Read(read.numbers, read.samples, pinned(read.batch, self._device))


def pinned(batch: Batch, device: torch.device) -> Batch:
    """The batch, page-locked if it is for a GPU: a copy from other memory waits for the GPU's work and for itself."""
    return batch.each(torch.Tensor.pin_memory) if device.type == "cuda" else batch
