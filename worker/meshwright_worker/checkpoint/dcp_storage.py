"""Storage for torch's distributed checkpoint without pickle: safetensors for tensors, and an index that is only data.

torch plans which rank reads which part of which box, and this module reads it; `save_plan` is the other direction. One
file per rank, with many ranks in subdirectories. A checkpoint with few boxes has the index of format 1, which every
version reads. An index with more boxes is binary: with it the checkpoint has format 2.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from meshwright_worker.checkpoint.binary_index import BINARY_INDEX, encode_binary
from meshwright_worker.checkpoint.files import CheckpointPath, files_of, open_index
from meshwright_worker.checkpoint.tensor_index import INDEX, IndexInMemory, StoredChunk, TensorIndex, encode
from meshwright_worker.rank.task import WorkProgress

MAX_JSON_BOXES = 20_000
"""Boxes of an index that is still written as JSON: 2 MB, which a rank reads in 0.3 s."""
RANKS_PER_DIRECTORY = 1024
"""Files of ranks in one directory, because large directories are slow on many file systems."""


class CheckpointReader(StorageReader):
    """Reads from a complete checkpoint: of the index and of the files, only the parts that this rank needs.

    `tensors` are those that the rank loads; by default the reader describes every box of every tensor. `progress`
    counts the bytes that are read of them.
    """

    def __init__(
        self,
        checkpoint: CheckpointPath,
        tensors: Mapping[str, torch.Tensor] | None = None,
        progress: WorkProgress | None = None,
    ) -> None:
        self._files = files_of(checkpoint)
        self._progress = progress or WorkProgress()
        self._tensors = tensors
        self._metadata = Metadata({})

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index.

        Raises:
            ValueError: it is not a valid index.
        """
        return metadata_of(open_index(self._files), self._tensors)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Store the index for `read_data`."""
        self._metadata = metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the parts of the plan into the planner's tensors."""
        entries = [self._entry(item.storage_index.fqn) for item in plan.items]
        sizes = [
            item.lengths.numel() * entry.properties.dtype.itemsize
            for item, entry in zip(plan.items, entries, strict=True)
        ]
        counted = self._progress.begin("checkpoint", sum(sizes))
        for item, entry, size in zip(plan.items, entries, sizes, strict=True):
            stored: StoredChunk = self._metadata.storage_data[item.storage_index]
            chunk = next(chunk for chunk in entry.chunks if chunk.offsets == item.storage_index.offset)
            box = self._files.tensor(stored.file, stored.offset, entry.properties.dtype, chunk.sizes)
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                box = box.narrow(dimension, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(box)
            planner.commit_tensor(item, target)
            counted(size)
        return _completed_future(None)

    def _entry(self, name: str) -> TensorStorageMetadata:
        entry = self._metadata.state_dict_metadata[name]
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{name} is not a tensor")
        return entry

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader is used for one load."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any path."""
        return True


def file_of_rank(rank: int) -> str:
    """The name of the file that a rank writes."""
    name = f"rank-{rank:05d}.safetensors"
    return name if rank < RANKS_PER_DIRECTORY else f"ranks-{rank // RANKS_PER_DIRECTORY:03d}/{name}"


def encoded_index(index: IndexInMemory) -> tuple[str, bytes]:
    """Name and content of the index's file."""
    if index.box_count <= MAX_JSON_BOXES:
        return INDEX, encode(index)
    return BINARY_INDEX, encode_binary(index)


def metadata_of(index: TensorIndex, tensors: Mapping[str, torch.Tensor] | None = None) -> Metadata:
    """What torch plans a load from. `storage_data` maps each box to its `StoredChunk`.

    With `tensors`, it has only the boxes that overlap the local part of these tensors: torch compares every box with
    every local one, and each is a Python object.
    """
    described: dict[str, TensorStorageMetadata] = {}
    stored: dict[MetadataIndex, StoredChunk] = {}
    files = index.files
    for name in index.names:
        chunks: list[ChunkStorageMetadata] = []
        dtype, shape = index.dtype(name), index.shape(name)
        if tensors is None or name in tensors:
            boxes = index.boxes(name)
            if tensors is not None and len(boxes) > 1:
                local = [chunk for chunk in _create_chunk_list(tensors[name]) if len(chunk.offsets) == len(shape)]
                parts = [boxes.overlapping(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in local]
            else:
                parts = [boxes]
            rows = (
                row
                for part in parts
                for row in zip(
                    part.offsets.tolist(), part.sizes.tolist(), part.files.tolist(), part.starts.tolist(), strict=True
                )
            )
            for offsets, sizes, file, start in rows:
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                stored[MetadataIndex(name, offsets)] = StoredChunk(files[file], start)
        described[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), shape, chunks)
    return Metadata(dict(described), storage_data=stored)


def _completed_future(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
