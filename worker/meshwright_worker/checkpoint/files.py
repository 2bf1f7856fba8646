"""The files of one complete checkpoint, wherever it is stored, and its index."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from meshwright_worker.checkpoint.binary_index import BINARY_INDEX, BinaryIndex
from meshwright_worker.checkpoint.safetensors_format import file_checksum, map_tensor
from meshwright_worker.checkpoint.tensor_index import INDEX, TensorIndex, decode
from meshwright_worker.rank.task import Progress, no_report


class CheckpointFiles(Protocol):
    """Reads the files of one checkpoint. Its `str` is the checkpoint's path or URI.

    Every method raises FileNotFoundError if a file is missing, and another OSError if it cannot be read.
    """

    def read(self, name: str) -> bytes:
        """The content of a file."""

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """`length` bytes of a file from `offset` on, or fewer at its end."""

    def tensor(self, name: str, offset: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """A tensor whose bytes begin at `offset`. Changes to it are not written.

        Raises:
            ValueError: the file is too short.
        """

    def checksum(self, name: str, progress: Progress = no_report) -> tuple[int, int]:
        """Size and CRC-32 of a file. `progress` is called after each part that was read."""

    def label(self, name: str) -> str:
        """Path or URI of a file, for messages."""


class LocalFiles:
    """The files of a checkpoint in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __str__(self) -> str:
        return str(self._directory)

    def read(self, name: str) -> bytes:
        """See `CheckpointFiles.read`."""
        return (self._directory / name).read_bytes()

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """See `CheckpointFiles.read_range`."""
        with (self._directory / name).open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def tensor(self, name: str, offset: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """See `CheckpointFiles.tensor`. Maps the file: only the accessed parts are read."""
        return map_tensor(self._directory / name, offset, dtype, shape)

    def checksum(self, name: str, progress: Progress = no_report) -> tuple[int, int]:
        """See `CheckpointFiles.checksum`."""
        return file_checksum(self._directory / name, progress)

    def label(self, name: str) -> str:
        """See `CheckpointFiles.label`."""
        return str(self._directory / name)


CheckpointPath = Path | CheckpointFiles
"""A checkpoint: a directory, or the files of one."""


def files_of(checkpoint: CheckpointPath) -> CheckpointFiles:
    """The files of a checkpoint."""
    return LocalFiles(checkpoint) if isinstance(checkpoint, Path) else checkpoint


def open_index(files: CheckpointFiles) -> TensorIndex:
    """Open the index of a checkpoint, in the encoding that it has.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a valid index.
    """
    try:
        return BinaryIndex(lambda offset, length: files.read_range(BINARY_INDEX, offset, length))
    except FileNotFoundError:
        return decode(files.read(INDEX))
