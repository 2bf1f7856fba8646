"""The directory of a job's checkpoints: complete ones have a plain name, incomplete ones a hidden name.

A checkpoint is written under a hidden name and renamed once all of its bytes are on the disk. After a crash at any time
there are only complete checkpoints and hidden directories, which no reader uses and the next start removes. One
exception: a checkpoint that was hidden to be replaced is restored if its replacement was not completed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from meshwright.api.checkpoint import Retention
from meshwright_worker.checkpoint.files import LocalFiles
from meshwright_worker.checkpoint.manifest import (
    MANIFEST,
    BaseManifest,
    FileRecord,
    encode_manifest,
    read_evaluation_loss,
)
from meshwright_worker.checkpoint.retention import removable
from meshwright_worker.checkpoint.safetensors_format import ChecksummedFile, write_tensors
from meshwright_worker.checkpoint_errors import NewerCheckpointsError

log = logging.getLogger(__name__)

_COMPLETE = re.compile(r"step-(\d{8,})")
INCOMPLETE, DAMAGED = "incomplete", "damaged"
"""States of checkpoints that no reader uses."""
_CANNOT_SYNC_DIRECTORIES = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
"""Of some file systems, such as CIFS and FUSE: they flush names by themselves, or not at all."""
_TEMPORARY, _DAMAGED, _REPLACED, _RETIRED = ".writing-", ".damaged-", ".replaced-", ".retired-"


class CheckpointDirectory:
    """Names, commits and removes checkpoints under one root. Only rank 0 changes anything, except inside `temporary`.

    The hidden name contains the mesh generation, so a straggler of an older one cannot write into a newer one's
    checkpoint.
    """

    is_remote = False

    def __init__(self, root: Path, generation: int = 0) -> None:
        self.root = root
        self._generation = generation
        self._losses: dict[int, float | None] = {}
        """The evaluation losses of complete checkpoints that were read."""

    def __str__(self) -> str:
        return str(self.root)

    def path(self, step: int) -> Path:
        """Path of the complete checkpoint of a step."""
        return self.root / f"step-{step:08d}"

    def temporary(self, step: int) -> Path:
        """Path of the checkpoint of a step while it is written."""
        return self.root / f"{_TEMPORARY}{self._generation}-{self.path(step).name}"

    def steps(self) -> list[int]:
        """The steps of complete checkpoints, newest first."""
        found = ((entry, _COMPLETE.fullmatch(entry.name)) for entry in self._entries())
        return sorted((int(name[1]) for entry, name in found if name and _has_manifest(entry)), reverse=True)

    def files(self, step: int) -> LocalFiles:
        """See `CheckpointStore.files`."""
        return LocalFiles(self.path(step))

    def location(self, step: int) -> str:
        """See `CheckpointStore.location`."""
        return str(self.path(step))

    def sink(self, step: int) -> LocalSink:
        """See `CheckpointStore.sink`."""
        return LocalSink(self.temporary(step))

    def prepare(self, step: int) -> Path:
        """Create an empty hidden directory for a checkpoint that is about to be written.

        Raises:
            NewerCheckpointsError: there are checkpoints of later steps, so `retain` would remove this one first.
        """
        newer_steps = [found for found in self.steps() if found > step]
        if newer_steps:
            raise NewerCheckpointsError(
                f"{self.root} has checkpoints of later steps than {step}, up to {newer_steps[0]}: load the newest "
                "before "
                "training, or save to an empty directory"
            )
        self._remove_unfinished()
        return self.make_place(step)

    def make_place(self, step: int) -> Path:
        """See `CheckpointStore.make_place`."""
        path = self.temporary(step)
        _remove(path)
        path.mkdir(parents=True)
        return path

    def _remove_unfinished(self) -> None:
        """Remove what earlier generations were writing when they were interrupted and recovered in memory."""
        for entry in self._entries(_TEMPORARY):
            number = entry.name.removeprefix(_TEMPORARY).partition("-")[0]
            if number.isdecimal() and int(number) < self._generation:
                _remove(entry)

    def commit(self, manifest: BaseManifest) -> Path:
        """Complete the checkpoint that was written under its hidden name: write the manifest, then rename."""
        return self.complete(manifest.state.step, encode_manifest(manifest), manifest.files)

    def complete(self, step: int, manifest: bytes, files: Iterable[str]) -> Path:
        """See `CheckpointStore.complete`."""
        hidden, final = self.temporary(step), self.path(step)
        self._losses.pop(step, None)
        write_durably(hidden / MANIFEST, manifest)
        for directory in sorted({(hidden / name).parent for name in files} | {hidden}, reverse=True):
            _sync_directory(directory)
        replaced = self._hide(final, _REPLACED) if _exists(final) else None
        try:
            hidden.rename(final)
        except OSError:
            if replaced is not None:
                with contextlib.suppress(OSError):
                    replaced.rename(final)
            raise
        _sync_directory(self.root)
        return final

    def amend(self, manifest: BaseManifest) -> None:
        """See `CheckpointStore.amend`."""
        path = self.path(manifest.state.step)
        following = path / f".{MANIFEST}"
        following.unlink(missing_ok=True)
        write_durably(following, encode_manifest(manifest))
        following.replace(path / MANIFEST)
        _sync_directory(path)

    def unfinished(self) -> dict[int, str]:
        """See `CheckpointStore.unfinished`."""
        found = {}
        for entry in self._entries():
            for prefix, state in ((_TEMPORARY, INCOMPLETE), (_DAMAGED, DAMAGED)):
                name = _COMPLETE.search(entry.name) if entry.name.startswith(prefix) else None
                if name is not None:
                    found[int(name[1])] = state
        return found

    def saved_at(self, step: int) -> float | None:
        """See `CheckpointStore.saved_at`."""
        try:
            return (self.path(step) / MANIFEST).stat().st_mtime
        except FileNotFoundError:
            return None

    def evaluation_losses(self) -> dict[int, float | None]:
        """See `CheckpointStore.evaluation_losses`."""
        return {step: self._evaluation_loss(step) for step in self.steps()}

    def _evaluation_loss(self, step: int) -> float | None:
        """That of a complete checkpoint. Its manifest is read once: only this process writes another one."""
        if step not in self._losses:
            self._losses[step] = read_evaluation_loss(self.files(step))
        return self._losses[step]

    def retain(self, retention: Retention) -> None:
        """See `CheckpointStore.retain`. Call it after a commit: until a newer checkpoint exists, users may want to
        inspect a damaged one.
        """
        for step in removable(self.steps(), retention, time.time(), self.saved_at, self._evaluation_loss):
            self._hide(self.path(step), _RETIRED)
        self._remove_hidden(_RETIRED, _REPLACED, _DAMAGED)

    def discard(self, step: int) -> None:
        """See `CheckpointStore.discard`."""
        _remove(self.temporary(step))

    def remove_newer(self, step: int) -> None:
        """Remove the complete checkpoints of later steps, the latest first."""
        for newer in self.steps():
            if newer > step:
                self._hide(self.path(newer), _RETIRED)
        self._remove_hidden(_RETIRED)

    def clean(self) -> None:
        """Remove the unfinished, retired or replaced checkpoints of earlier processes. Call before any save.

        A checkpoint whose replacement was not completed is restored.
        """
        for hidden in self._entries(_REPLACED):
            plain = hidden.with_name(hidden.name.removeprefix(_REPLACED))
            if _has_manifest(hidden) and not _exists(plain):
                hidden.rename(plain)
        self._remove_hidden(_TEMPORARY, _RETIRED, _REPLACED)
        for entry in self._entries():
            # A checkpoint gets its plain name with its manifest, so that somebody has removed it, or copied the rest.
            if _COMPLETE.fullmatch(entry.name) and not _has_manifest(entry):
                log.warning(
                    "%s has no file %s, and does not count as a checkpoint: restore the file, or remove the directory",
                    *(entry, MANIFEST),
                )

    def quarantine(self, step: int) -> None:
        """Hide a damaged checkpoint. It stays on the disk until the next one is complete."""
        if _exists(self.path(step)):
            self._hide(self.path(step), _DAMAGED)

    def _hide(self, path: Path, prefix: str) -> Path:
        # Renamed before it is removed: a half-removed directory under a plain name would count as a checkpoint.
        hidden = path.with_name(prefix + path.name)
        _remove(hidden)
        return path.rename(hidden)

    def _remove_hidden(self, *prefixes: str) -> None:
        for entry in self._entries(*prefixes):
            _remove(entry)

    def _entries(self, *prefixes: str) -> list[Path]:
        """What is in the root, with one of the prefixes if any are given. Unlike `Path.glob`, it hides no error."""
        try:
            return [entry for entry in self.root.iterdir() if not prefixes or entry.name.startswith(prefixes)]
        except FileNotFoundError:
            return []


class LocalSink:
    """Writes the files of a checkpoint into an existing directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write_tensors(self, name: str, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, int], FileRecord]:
        """See `CheckpointSink.write_tensors`."""
        (self._directory / name).parent.mkdir(exist_ok=True)
        # A process that wrote it may have died.
        (self._directory / name).unlink(missing_ok=True)
        starts, size, checksum = write_tensors(self._directory / name, tensors)
        return starts, FileRecord(size=size, crc32=checksum)

    def copy(self, name: str, parts: Callable[[], Iterable[bytes]]) -> FileRecord:
        """See `CheckpointSink.copy`."""
        (self._directory / name).parent.mkdir(exist_ok=True)
        with (self._directory / name).open("xb") as file:
            written = ChecksummedFile(file)
            for part in parts():
                written.write(part)
            file.flush()
            os.fsync(file.fileno())
        return FileRecord(size=written.size, crc32=written.checksum)

    def write(self, name: str, content: bytes) -> FileRecord:
        """See `CheckpointSink.write`."""
        write_durably(self._directory / name, content)
        return FileRecord(size=len(content), crc32=zlib.crc32(content))


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file and flush it to the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _has_manifest(checkpoint: Path) -> bool:
    """Whether a directory is a complete checkpoint. A directory with the name of the manifest is none: reading it fails
    as on a volume that does not work, at each start.
    """
    manifest = checkpoint / MANIFEST
    return _exists(manifest) and not manifest.is_dir()


def _exists(path: Path) -> bool:
    """Whether a path exists. `Path.exists` says no after some errors of a volume, from Python 3.14 on after all."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _remove(path: Path) -> None:
    """Remove a directory that no reader uses. What cannot be removed is logged: it takes space, and does no harm."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("%s cannot be removed, and takes space: %s", path, error)
        shutil.rmtree(path, ignore_errors=True)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC_DIRECTORIES:
            raise
    finally:
        os.close(descriptor)
