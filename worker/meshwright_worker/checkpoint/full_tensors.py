"""The tensors of a checkpoint in one process, whole and one at a time, whatever layout wrote them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.errors import DamagedCheckpointError
from meshwright_worker.checkpoint.manifest import Manifest, read_manifest
from meshwright_worker.checkpoint.safetensors_format import map_tensor
from meshwright_worker.checkpoint.tensor_index import INDEX, decode
from meshwright_worker.checkpoint.verification import check_files

log = logging.getLogger(__name__)


def find_checkpoint(path: Path, *, verify: bool = True) -> tuple[Path, Manifest]:
    """A checkpoint whose files are what was written, and its manifest; of a job's directory, the newest such one.

    Reads every byte of it; without `verify` the manifest alone, for ranks that verify their shares together later.

    Raises:
        FileNotFoundError: there is no complete checkpoint.
        DamagedCheckpointError: it is damaged, or all are. The message names the file.
        ForeignCheckpointError: it is of another kind or version.
        OSError: it cannot be read.
    """
    return first_intact(candidate_checkpoints(path), _verified if verify else read_manifest)


def candidate_checkpoints(path: Path) -> list[Path]:
    """The checkpoints of a job's directory, newest first; for any other path, that one."""
    directory = CheckpointDirectory(path)
    return [directory.path(step) for step in directory.steps()] or [path]


def first_intact(checkpoints: Sequence[Path], read: Callable[[Path], Manifest]) -> tuple[Path, Manifest]:
    """The first checkpoint that `read` does not find damaged, and what it read.

    Raises:
        As `find_checkpoint`, for what `read` finds.
    """
    damages = []
    for checkpoint in checkpoints:
        try:
            manifest = read(checkpoint)
        except FileNotFoundError:
            raise FileNotFoundError(f"`--checkpoint {checkpoint}` holds no complete checkpoint") from None
        except DamagedCheckpointError as error:
            damages.append(str(error))
            continue
        for damage in damages:
            log.warning("%s; the checkpoint of step %d is taken", damage, manifest.state.step)
        return checkpoint, manifest
    raise DamagedCheckpointError("; ".join(damages))


def _verified(checkpoint: Path) -> Manifest:
    manifest = read_manifest(checkpoint)
    check_files(checkpoint, manifest)
    return manifest


class FullTensorReader:
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
