"""Tensors in memory-mapped files, the tier below host memory (ZeRO-Infinity, arXiv 2104.07857)."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch


def mmap_zeros(directory: str, elements: int, dtype: torch.dtype, prefix: str, option: str) -> torch.Tensor:
    """Return zeros, [elements], in a new unnamed file, which is deleted with the process, however that exits.

    Args:
        directory: for the file; created if it does not exist.
        elements: number of elements.
        dtype: the tensor's format.
        prefix: of the file's temporary name.
        option: the field that names the directory.

    Raises:
        OSError: the directory cannot be created, or has no free space.
    """
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=prefix, dir=directory)
        try:
            # A write to a mapping without free disk space kills the process with SIGBUS: allocate the space now.
            os.posix_fallocate(descriptor, 0, max(1, elements) * dtype.itemsize)
            return torch.from_file(name, shared=True, size=max(1, elements), dtype=dtype)[:elements]
        finally:
            os.close(descriptor)
            os.unlink(name)
    except OSError as error:
        raise OSError(error.errno, f"`{option}: {directory}` cannot hold what it is for: {error.strerror}") from error
