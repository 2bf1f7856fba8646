"""`tensors.index`: the index of a checkpoint's tensors in binary, of which a reader loads only what it needs.

    8 bytes    "MWINDEX2"
    u64        length of the table
    u32        CRC-32 of the table
    table      zlib, JSON: {"files": [name, ...], "tensors": {name: [dtype, shape, boxes, first, length, crc32]}}
    blocks     one of each tensor, at `first` bytes behind the table

A block is zlib of int64 columns (offsets and sizes of each dimension, number of the file, first byte in it), each as
differences from one row to the next: the boxes of a grid have few different ones. Numbers are little-endian. The table
and each block have a checksum, because a reader that loads a part cannot compare the file with the manifest's.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from meshwright_worker.checkpoint.safetensors_format import DTYPES, dtype_name
from meshwright_worker.checkpoint.tensor_index import Boxes, IndexInMemory, check_boxes, checked_name

BINARY_INDEX = "tensors.index"

ReadRange = Callable[[int, int], bytes]
"""Returns `length` bytes of the file from `offset` on, or fewer at its end."""

_MAGIC = b"MWINDEX2"
_HEAD = struct.Struct("<8sQI")
_FIRST_READ = 1 << 20
"""Bytes of the first read: the table of most checkpoints, so that a store with slow requests is asked once."""
_MAX_BOXES = 1 << 28
"""More boxes than any tensor has: a larger number is damage, not a reason to allocate memory."""


def encode_binary(index: IndexInMemory) -> bytes:
    """The content of `tensors.index`."""
    blocks: list[bytes] = []
    tensors: dict[str, list[Any]] = {}
    first = 0
    for name, tensor in index.items():
        block = _encode_boxes(tensor.boxes)
        crc = zlib.crc32(block)
        tensors[name] = [dtype_name(tensor.dtype), list(tensor.shape), len(tensor.boxes), first, len(block), crc]
        blocks.append(block)
        first += len(block)
    table = zlib.compress(json.dumps({"files": index.files, "tensors": tensors}, separators=(",", ":")).encode())
    return b"".join([_HEAD.pack(_MAGIC, len(table), zlib.crc32(table)), table, *blocks])


class BinaryIndex:
    """An index that reads the boxes of a tensor when they are asked for.

    Raises:
        ValueError: the table is damaged.
        OSError: the file cannot be read.
    """

    def __init__(self, read: ReadRange) -> None:
        self._read = read
        self._beginning = read(0, _FIRST_READ)
        if len(self._beginning) < _HEAD.size:
            raise ValueError("not an index of tensors: it is too short")
        magic, length, crc = _HEAD.unpack_from(self._beginning)
        if magic != _MAGIC:
            raise ValueError(f"not an index of tensors: it begins with {magic!r}")
        self._blocks = _HEAD.size + length
        try:
            self.files, self._tensors = _decode_table(self._bytes(_HEAD.size, length), crc)
        except (ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
            raise ValueError(f"not an index of tensors: {error}") from error

    @property
    def names(self) -> list[str]:
        """See `TensorIndex.names`."""
        return list(self._tensors)

    def dtype(self, name: str) -> torch.dtype:
        """See `TensorIndex.dtype`."""
        return DTYPES[self._tensors[name][0]]

    def shape(self, name: str) -> torch.Size:
        """See `TensorIndex.shape`."""
        return torch.Size(self._tensors[name][1])

    def boxes(self, name: str) -> Boxes:
        """See `TensorIndex.boxes`."""
        _, shape, count, first, length, crc = self._tensors[name]
        block = self._bytes(self._blocks + first, length)
        if zlib.crc32(block) != crc:
            raise ValueError(f"the index is damaged: wrong checksum of the boxes of {name}")
        boxes = _decode_boxes(block, count, len(shape))
        if boxes.files.size and int(boxes.files.max()) >= len(self.files):
            raise ValueError(f"the index is damaged: {name} is in a file that it does not list")
        return boxes

    def _bytes(self, offset: int, length: int) -> bytes:
        if offset + length <= len(self._beginning):
            return self._beginning[offset : offset + length]
        content = self._read(offset, length)
        if len(content) != length:
            raise ValueError("the index is damaged: it is too short")
        return content


def _decode_table(content: bytes, crc: int) -> tuple[list[str], dict[str, list[Any]]]:
    if zlib.crc32(content) != crc:
        raise ValueError("wrong checksum of its table")
    table = json.loads(zlib.decompress(content))
    tensors: dict[str, list[Any]] = table["tensors"]
    for name, (dtype, shape, count, first, length, _) in tensors.items():
        if dtype not in DTYPES or math.prod(shape) < 0 or not 0 <= count <= _MAX_BOXES or min(first, length) < 0:
            raise ValueError(f"{name} is not described as any version does")
    return [checked_name(file) for file in table["files"]], tensors


def _encode_boxes(boxes: Boxes) -> bytes:
    columns = [*boxes.offsets.T, *boxes.sizes.T, boxes.files, boxes.starts]
    return zlib.compress(b"".join(np.diff(column, prepend=0).astype("<i8").tobytes() for column in columns), 1)


def _decode_boxes(block: bytes, count: int, dimensions: int) -> Boxes:
    expected = (2 * dimensions + 2) * count * 8
    decompress = zlib.decompressobj()
    try:
        # Bounded, because a few bytes can expand to any number.
        content = decompress.decompress(block, expected + 1)
    except zlib.error as error:
        raise ValueError(f"the index is damaged: {error}") from error
    if len(content) != expected:
        raise ValueError("the index is damaged: a tensor has another number of boxes than its table says")
    columns = np.cumsum(np.frombuffer(content, "<i8").reshape(2 * dimensions + 2, count), axis=1).astype(np.int64)
    boxes = Boxes(columns[:dimensions].T, columns[dimensions : 2 * dimensions].T, columns[-2], columns[-1])
    check_boxes(boxes)
    return boxes
