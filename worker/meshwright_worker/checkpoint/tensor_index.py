"""The index of a checkpoint's tensors as JSON: which file contains which box of which tensor.

torch's distributed checkpoint stores this as a pickle, which executes code when it is read. Here it is only data.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from meshwright_worker.checkpoint.safetensors_format import DTYPES, dtype_name

INDEX = "tensors.json"


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """File and offset of the bytes of one box of a tensor."""

    file: str
    offset: int


def encode(metadata: Metadata, boxes: dict[MetadataIndex, StoredChunk]) -> bytes:
    """Encode the index of a checkpoint, as planned by torch and stored by a writer.

    Raises:
        ValueError: it contains an object that is not a tensor.
    """
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{name} is not a tensor: a checkpoint contains only tensors")
        chunks = []
        for chunk in entry.chunks:
            box = boxes[MetadataIndex(name, chunk.offsets)]
            chunks.append([list(chunk.offsets), list(chunk.sizes), box.file, box.offset])
        tensors[name] = {"dtype": dtype_name(entry.properties.dtype), "shape": list(entry.size), "boxes": chunks}
    return json.dumps(tensors, separators=(",", ":")).encode()


def decode(content: bytes) -> Metadata:
    """Decode an index; `storage_data` maps each box to its `StoredChunk`.

    Raises:
        ValueError: it is not a valid index.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    boxes: dict[MetadataIndex, StoredChunk] = {}
    try:
        for name, entry in json.loads(content).items():
            chunks = []
            for offsets, sizes, file, offset in entry["boxes"]:
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                boxes[MetadataIndex(name, offsets)] = StoredChunk(file, offset)
            properties = TensorProperties(dtype=DTYPES[entry["dtype"]])
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not an index of tensors: {error!r}") from error
    return Metadata(dict(tensors), storage_data=boxes)
