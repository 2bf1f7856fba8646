"""A tensor in a file that only passes through main memory: the tier below it (ZeRO-Infinity, arXiv 2104.07857)."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch


def mmap_zeros(directory: str, elements: int, dtype: torch.dtype, prefix: str, option: str) -> torch.Tensor:
    """Zeros, [elements], in a new file that has no name: it goes with the process, however that ends.

    Args:
        directory: where; made if it is not there.
        elements: how many.
        dtype: of what format.
        prefix: of the name that the file has for a moment.
        option: the field that named the directory.

    Raises:
        OSError: the directory cannot be made, or has no room.
    """
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=prefix, dir=directory)
        try:
            # Writing to a mapping that finds no room kills the process without a word: take the room now.
            os.posix_fallocate(descriptor, 0, max(1, elements) * dtype.itemsize)
            return torch.from_file(name, shared=True, size=max(1, elements), dtype=dtype)[:elements]
        finally:
            os.close(descriptor)
            os.unlink(name)
    except OSError as error:
        raise OSError(error.errno, f"`{option}: {directory}` cannot hold what it is for: {error.strerror}") from error
