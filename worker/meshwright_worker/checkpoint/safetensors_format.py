"""Tensor files in the safetensors format: a JSON header and raw bytes, so reading one cannot execute code.

Not the package of that name, because a checkpoint writes directly from staged tensors, and computes the checksum while
writing instead of reading the file again.
"""

from __future__ import annotations

import ctypes
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np
import torch

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BLOCK = 8 * 1024 * 1024
_WORTH_A_THREAD = 1024 * 1024


class TensorHeader(NamedTuple):
    """What a file says about a tensor."""

    name: str
    dtype: torch.dtype
    shape: torch.Size


class Writable(Protocol):
    """Takes bytes."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Append `data`."""


class ChecksummedFile:
    """A file that is being written, with its size and CRC-32 so far."""

    def __init__(self, file: Writable) -> None:
        self._file = file
        self.size = 0
        self.checksum = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`. Of large data, the checksum is computed while it is written."""
        for first in range(0, len(data), _BLOCK):
            block = data[first : first + _BLOCK]
            if len(block) < _WORTH_A_THREAD:
                self._file.write(block)
                self.checksum = zlib.crc32(block, self.checksum)
            else:
                checksum = _checksums(os.getpid()).submit(zlib.crc32, block, self.checksum)
                self._file.write(block)
                self.checksum = checksum.result()
            self.size += len(block)


class _EarlyWriteback:
    """A file whose content the kernel writes to the disk from the first block on, not only when it is flushed.

    Otherwise the disk is idle until then: on a local disk, a file takes half as long again.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._begun = 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        end = self._file.tell()
        if _SYNC_FILE_RANGE is not None and end - self._begun >= _BLOCK:
            self._file.flush()
            # Only a hint: whether everything is on the disk, and any error, is what fsync says.
            _SYNC_FILE_RANGE(self._file.fileno(), self._begun, end - self._begun, _SYNC_FILE_RANGE_WRITE)
            self._begun = end


@cache
def _checksums(process: int) -> ThreadPoolExecutor:
    """The thread that computes checksums in this process: a fork does not have its parent's."""
    return ThreadPoolExecutor(1, thread_name_prefix="checksums")


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


_SYNC_FILE_RANGE = _find_sync_file_range()
_SYNC_FILE_RANGE_WRITE = 2


def dtype_name(dtype: torch.dtype) -> str:
    """Return the format's name of a dtype.

    Raises:
        ValueError: the format does not support it.
    """
    if dtype not in _NAMES:
        raise ValueError(f"{dtype} has no name in the safetensors format")
    return _NAMES[dtype]


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[dict[str, int], int, int]:
    """Write tensors and `metadata` to a new file and flush it to the disk: see `write_tensors_to`."""
    with path.open("xb") as file:
        written = write_tensors_to(ChecksummedFile(_EarlyWriteback(file)), tensors, metadata)
        file.flush()
        os.fsync(file.fileno())
    return written


def write_tensors_to(
    file: ChecksummedFile, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[dict[str, int], int, int]:
    """Write tensors and `metadata` to an empty file.

    Returns:
        Where each tensor's bytes begin in the file; the file's size; its CRC-32.
    """
    encoded, starts = header_of([TensorHeader(name, x.dtype, x.shape) for name, x in tensors.items()], metadata)
    file.write(encoded)
    for tensor in tensors.values():
        file.write(_tensor_bytes(tensor))
    return dict(zip(tensors, starts, strict=True)), file.size, file.checksum


def header_of(tensors: Sequence[TensorHeader], metadata: Mapping[str, str] | None = None) -> tuple[bytes, list[int]]:
    """Everything in front of the first tensor's bytes, and where each tensor's bytes begin in the file."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets, end = [], 0
    for name, dtype, shape in tensors:
        offsets.append(end)
        end += shape.numel() * dtype.itemsize
        header[name] = {"dtype": dtype_name(dtype), "shape": list(shape), "data_offsets": [offsets[-1], end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    content = len(encoded).to_bytes(8, "little") + encoded
    return content, [len(content) + offset for offset in offsets]


def map_tensor(path: Path, offset: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """Map a tensor of a file into memory: only the accessed parts are read. Changes to it are not written to the file.

    Raises:
        ValueError: the file is too short.
    """
    length = shape.numel() * dtype.itemsize
    if not length:
        return torch.empty(shape, dtype=dtype)
    raw = np.memmap(path, dtype=np.uint8, mode="c", offset=offset, shape=(length,))
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def file_checksum(path: Path, progress: Callable[[int], None] = lambda _: None) -> tuple[int, int]:
    """Return size and CRC-32 of a file, read in blocks. `progress` is called after each, with its size."""
    size = checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
            progress(len(block))
    return size, checksum


def _tensor_bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data
