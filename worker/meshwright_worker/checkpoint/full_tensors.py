"""Reads the full tensors of a checkpoint in one process, one at a time, in whatever layout they were written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.files import CheckpointPath, files_of, open_index
from meshwright_worker.checkpoint.manifest import Manifest, check_files, read_manifest
from meshwright_worker.checkpoint.ranking import NONE_IS_BEST, ranked
from meshwright_worker.checkpoint.store import CheckpointStore, object_files, open_store
from meshwright_worker.checkpoint_errors import DamagedCheckpointError

log = logging.getLogger(__name__)


def find_checkpoint(
    location: Path | str, *, verify: bool = True, best: bool = False
) -> tuple[CheckpointPath, Manifest]:
    """Return an intact checkpoint and its manifest; for a job's directory or URI, the newest intact one, or with `best`
    the intact one with the lowest evaluation loss.

    Reads every byte of it. Without `verify` it reads only the manifest, for ranks that later verify their shares
    together.

    Raises:
        FileNotFoundError: there is no complete checkpoint, or with `best` none with an evaluation loss.
        DamagedCheckpointError: it is damaged, or all are. The message names the file.
        ForeignCheckpointError: it is of another kind or version.
        OSError: it cannot be read.
    """
    return first_intact(candidate_checkpoints(location, best=best), _verified if verify else read_manifest)


def candidate_checkpoints(location: Path | str, *, best: bool = False) -> list[CheckpointPath]:
    """Return the checkpoints of a job's directory or URI, newest first; for any other one, that one. With `best`, those
    with an evaluation loss, the lowest first.

    Raises:
        FileNotFoundError: none has an evaluation loss.
    """
    if isinstance(location, str) and "://" in location:
        store = open_store(location)
        return [store.files(step) for step in _ordered(store, best)] or [object_files(location)]
    path = Path(location)
    directory = CheckpointDirectory(path)
    return [directory.path(step) for step in _ordered(directory, best)] or [path]


def _ordered(store: CheckpointStore, best: bool) -> list[int]:
    if not best:
        return store.steps()
    if not (steps := ranked(store.evaluation_losses())):
        raise FileNotFoundError(NONE_IS_BEST.format(place=store))
    return steps


def first_intact(
    checkpoints: Sequence[CheckpointPath], read: Callable[[CheckpointPath], Manifest]
) -> tuple[CheckpointPath, Manifest]:
    """Return the first checkpoint for which `read` does not report damage, and the result of `read`.

    Raises:
        The errors of `find_checkpoint`, as raised by `read`.
    """
    damages = []
    for checkpoint in checkpoints:
        try:
            manifest = read(checkpoint)
        except FileNotFoundError:
            raise FileNotFoundError(f"`--checkpoint {checkpoint}` contains no complete checkpoint") from None
        except DamagedCheckpointError as error:
            damages.append(str(error))
            continue
        for damage in damages:
            log.warning("%s; using the checkpoint of step %d", damage, manifest.state.step)
        return checkpoint, manifest
    raise DamagedCheckpointError("; ".join(damages))


def _verified(checkpoint: CheckpointPath) -> Manifest:
    manifest = read_manifest(checkpoint)
    check_files(checkpoint, manifest)
    return manifest


class FullTensorReader:
    """Reads the tensors of a complete checkpoint.

    Raises:
        OSError: the index cannot be read.
        ValueError: the index is not valid.
    """

    def __init__(self, checkpoint: CheckpointPath) -> None:
        self._files = files_of(checkpoint)
        self._index = open_index(self._files)

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return self._index.names

    def read(self, name: str) -> torch.Tensor:
        """Read the full tensor of that name, on the CPU.

        Raises:
            KeyError: there is no such tensor.
        """
        dtype, boxes = self._index.dtype(name), self._index.boxes(name)
        whole = torch.empty(self._index.shape(name), dtype=dtype)
        for row in range(len(boxes)):
            offsets, sizes = boxes.offsets[row].tolist(), boxes.sizes[row].tolist()
            box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
            file, start = self._index.files[int(boxes.files[row])], int(boxes.starts[row])
            whole[box] = self._files.tensor(file, start, dtype, torch.Size(sizes))
        return whole
