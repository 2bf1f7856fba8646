"""The tensors of a checkpoint in one process, whole and one at a time, whatever layout wrote them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.index import INDEX, decode
from meshwright_worker.checkpoint.manifest import Manifest, read_manifest
from meshwright_worker.checkpoint.safetensors import map_tensor


def find_checkpoint(path: Path) -> tuple[Path, Manifest]:
    """A checkpoint and its manifest; of a job's directory, the newest one.

    Raises:
        FileNotFoundError: there is no complete checkpoint.
    """
    steps = CheckpointDirectory(path).steps()
    if steps:
        path = CheckpointDirectory(path).path(steps[0])
    try:
        return path, read_manifest(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"`--checkpoint {path}` holds no complete checkpoint") from None


class CheckpointTensors:
    """A complete checkpoint's tensors.

    Raises:
        OSError: the index cannot be read.
        ValueError: it is no index.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._metadata = decode((path / INDEX).read_bytes())

    @property
    def names(self) -> list[str]:
        """Every tensor's name."""
        return list(self._metadata.state_dict_metadata)

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor of that name, on the CPU.

        Raises:
            KeyError: there is none.
        """
        entry = self._metadata.state_dict_metadata[name]
        if not isinstance(entry, TensorStorageMetadata):
            raise KeyError(name)
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        for index, stored in self._metadata.storage_data.items():
            if index.fqn != name:
                continue
            chunk = next(chunk for chunk in entry.chunks if chunk.offsets == index.offset)
            box = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[box] = map_tensor(self._path / stored.file, stored.offset, entry.properties.dtype, chunk.sizes)
        return whole
