"""The index of a checkpoint's tensors: which file contains which box of which tensor.

torch's distributed checkpoint stores this as a pickle, which executes code when it is read. Here it is only data, in
one of two encodings. `tensors.json` (format 1) is read in full. `tensors.index` (format 2) is binary, and a rank reads
only the boxes of the tensors that it loads: 405B parameters on 16,384 ranks have millions of boxes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from meshwright_worker.checkpoint.safetensors_format import DTYPES, dtype_name

INDEX = "tensors.json"

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """File and offset of the bytes of one box of a tensor."""

    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class Boxes:
    """The boxes of one tensor, one row each, and where their bytes are."""

    offsets: Numbers
    """First index of each box in each dimension."""
    sizes: Numbers
    """Size of each box in each dimension."""
    files: Numbers
    """Number of the box's file in the index's list of files."""
    starts: Numbers
    """First byte of the box in its file."""

    def __len__(self) -> int:
        return len(self.files)

    def overlapping(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Boxes:
        """Only the boxes that have an element in common with the given one."""
        first, length = np.array(offsets, np.int64), np.array(sizes, np.int64)
        selected = ((self.offsets < first + length) & (first < self.offsets + self.sizes)).all(axis=1)
        return Boxes(self.offsets[selected], self.sizes[selected], self.files[selected], self.starts[selected])


class TensorIndex(Protocol):
    """An index that is open for reading."""

    @property
    def files(self) -> list[str]:
        """The names of the files with tensors."""

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""

    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor's elements.

        Raises:
            KeyError: there is no such tensor.
        """

    def shape(self, name: str) -> torch.Size:
        """The shape of a full tensor.

        Raises:
            KeyError: there is no such tensor.
        """

    def boxes(self, name: str) -> Boxes:
        """The boxes of a tensor.

        Raises:
            KeyError: there is no such tensor.
            ValueError: the index is damaged here.
        """


@dataclass(frozen=True, slots=True)
class IndexedTensor:
    """A tensor in an index."""

    dtype: torch.dtype
    shape: torch.Size
    boxes: Boxes


class IndexInMemory:
    """An index whose boxes are all in memory: of a checkpoint that is being saved, or in the encoding of format 1."""

    def __init__(self, files: list[str], tensors: Mapping[str, IndexedTensor]) -> None:
        self.files = files
        self._tensors = tensors

    @property
    def names(self) -> list[str]:
        """See `TensorIndex.names`."""
        return list(self._tensors)

    @property
    def box_count(self) -> int:
        """Boxes of all tensors."""
        return sum(len(tensor.boxes) for tensor in self._tensors.values())

    def items(self) -> Iterator[tuple[str, IndexedTensor]]:
        """Every tensor with its name."""
        yield from self._tensors.items()

    def dtype(self, name: str) -> torch.dtype:
        """See `TensorIndex.dtype`."""
        return self._tensors[name].dtype

    def shape(self, name: str) -> torch.Size:
        """See `TensorIndex.shape`."""
        return self._tensors[name].shape

    def boxes(self, name: str) -> Boxes:
        """See `TensorIndex.boxes`."""
        return self._tensors[name].boxes


def index_of(metadata: Metadata, stored: Mapping[MetadataIndex, StoredChunk]) -> IndexInMemory:
    """Build the index of a checkpoint, as planned by torch and stored by a writer.

    Raises:
        ValueError: it contains an object that is not a tensor.
    """
    numbers: dict[str, int] = {}
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{name} is not a tensor: a checkpoint contains only tensors")
        chunks = [stored[MetadataIndex(name, chunk.offsets)] for chunk in entry.chunks]
        boxes = make_boxes(
            [list(chunk.offsets) for chunk in entry.chunks],
            [list(chunk.sizes) for chunk in entry.chunks],
            [numbers.setdefault(chunk.file, len(numbers)) for chunk in chunks],
            [chunk.offset for chunk in chunks],
            len(entry.size),
        )
        tensors[name] = IndexedTensor(entry.properties.dtype, entry.size, boxes)
    return IndexInMemory(list(numbers), tensors)


def make_boxes(
    offsets: list[list[int]], sizes: list[list[int]], files: list[int], starts: list[int], dimensions: int
) -> Boxes:
    """Boxes of a tensor with the given number of dimensions.

    Raises:
        ValueError: a box has another number of dimensions, or a number is negative.
    """
    count = len(files)
    boxes = Boxes(
        np.array(offsets, np.int64).reshape(count, dimensions),
        np.array(sizes, np.int64).reshape(count, dimensions),
        np.array(files, np.int64),
        np.array(starts, np.int64),
    )
    check_boxes(boxes)
    return boxes


def check_boxes(boxes: Boxes) -> None:
    """Reject boxes that no writer makes.

    Raises:
        ValueError: a number is negative.
    """
    if any(column.size and int(column.min()) < 0 for column in (boxes.offsets, boxes.sizes, boxes.files, boxes.starts)):
        raise ValueError("a box has a negative number")


def encode(index: IndexInMemory) -> bytes:
    """The content of `tensors.json`."""
    tensors = {}
    for name, tensor in index.items():
        boxes = tensor.boxes
        rows = zip(
            boxes.offsets.tolist(), boxes.sizes.tolist(), boxes.files.tolist(), boxes.starts.tolist(), strict=True
        )
        entry = [[offsets, sizes, index.files[file], start] for offsets, sizes, file, start in rows]
        tensors[name] = {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "boxes": entry}
    return json.dumps(tensors, separators=(",", ":")).encode()


def decode(content: bytes) -> IndexInMemory:
    """Decode the content of `tensors.json`.

    Raises:
        ValueError: it is not a valid index.
    """
    numbers: dict[str, int] = {}
    tensors: dict[str, IndexedTensor] = {}
    try:
        for name, entry in json.loads(content).items():
            rows, shape = entry["boxes"], torch.Size(entry["shape"])
            boxes = make_boxes(
                [offsets for offsets, _, _, _ in rows],
                [sizes for _, sizes, _, _ in rows],
                [numbers.setdefault(file, len(numbers)) for _, _, file, _ in rows],
                [start for _, _, _, start in rows],
                len(shape),
            )
            tensors[name] = IndexedTensor(DTYPES[entry["dtype"]], shape, boxes)
        files = [checked_name(file) for file in numbers]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"not an index of tensors: {error!r}") from error
    return IndexInMemory(files, tensors)


def checked_name(file: object) -> str:
    """The name of a file in a checkpoint's directory.

    Raises:
        ValueError: it is not a relative path inside of the directory.
    """
    if not isinstance(file, str) or not file or any(part in ("", ".", "..") for part in file.split("/")):
        raise ValueError(f"{file!r} is not the name of a file in a checkpoint")
    return file
