"""Checkpoints behind a URI of fsspec, such as `s3://bucket/prefix`: an object store cannot rename.

A checkpoint is the objects below `step-<number>-g<generation>/`. Its manifest is written last and removed first: a
checkpoint without a manifest is incomplete, and no reader uses it. A straggler of an older mesh generation writes below
another prefix. Each request is retried while its error may pass (`retry`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from meshwright.api.checkpoint import Retention
from meshwright_worker.checkpoint.directory import DAMAGED, INCOMPLETE
from meshwright_worker.checkpoint.manifest import (
    MANIFEST,
    BaseManifest,
    FileRecord,
    encode_manifest,
    read_evaluation_loss,
)
from meshwright_worker.checkpoint.retention import removable
from meshwright_worker.checkpoint.retry import RetryPolicy, error_code, retry
from meshwright_worker.checkpoint.safetensors_format import ChecksummedFile, write_tensors_to
from meshwright_worker.checkpoint_errors import CheckpointStoreError, NewerCheckpointsError
from meshwright_worker.rank.task import Progress, no_report

log = logging.getLogger(__name__)

_CHECKPOINT = re.compile(r"step-(\d{8,})-g(\d+)")
_DAMAGED = "damaged"
"""An object that marks a checkpoint as damaged, because it cannot be renamed."""
PART_BYTES = 32 << 20
"""Bytes of a part of a multipart upload, and of a request that reads a file to verify it."""


class ObjectFiles:
    """The files of a checkpoint in an object store."""

    def __init__(self, filesystem: Any, path: str, uri: str, policy: RetryPolicy) -> None:
        self._filesystem = filesystem
        self._path = path
        self._uri = uri
        self._policy = policy

    def __str__(self) -> str:
        return self._uri

    def read(self, name: str) -> bytes:
        """See `CheckpointFiles.read`."""
        return self._get(name, None, None)

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """See `CheckpointFiles.read_range`."""
        # A range behind the end of an object is an error for some stores.
        size = self._size(name)
        return self._get(name, offset, min(offset + length, size)) if offset < size and length else b""

    def tensor(self, name: str, offset: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """See `CheckpointFiles.tensor`."""
        length = shape.numel() * dtype.itemsize
        if not length:
            return torch.empty(shape, dtype=dtype)
        content = self._get(name, offset, offset + length)
        if len(content) != length:
            raise ValueError(f"{self.label(name)} is too short")
        return torch.from_numpy(np.frombuffer(bytearray(content), np.uint8)).view(dtype).reshape(shape)

    def checksum(self, name: str, progress: Progress = no_report) -> tuple[int, int]:
        """See `CheckpointFiles.checksum`."""
        size, crc = self._size(name), 0
        for first in range(0, size, PART_BYTES):
            part = self._get(name, first, min(first + PART_BYTES, size))
            crc = zlib.crc32(part, crc)
            progress(len(part))
        return size, crc

    def label(self, name: str) -> str:
        """See `CheckpointFiles.label`."""
        return f"{self._uri}/{name}"

    def _size(self, name: str) -> int:
        return int(self._retried(name, lambda: self._filesystem.info(f"{self._path}/{name}")["size"]))

    def _get(self, name: str, start: int | None, end: int | None) -> bytes:
        content: bytes = self._retried(
            name, lambda: self._filesystem.cat_file(f"{self._path}/{name}", start=start, end=end)
        )
        return content

    def _retried(self, name: str, action: Any) -> Any:
        return retry(action, f"{self.label(name)} cannot be read", self._policy)


class ObjectSink:
    """Writes the files of a checkpoint that is being saved."""

    def __init__(self, filesystem: Any, path: str, uri: str, policy: RetryPolicy) -> None:
        self._filesystem = filesystem
        self._path = path
        self._uri = uri
        self._policy = policy

    def write_tensors(self, name: str, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, int], FileRecord]:
        """See `CheckpointSink.write_tensors`. Large objects are uploaded in parts."""

        def upload() -> tuple[dict[str, int], int, int]:
            with self._upload(name) as file:
                return write_tensors_to(file, tensors)

        starts, size, crc = retry(upload, f"{self._uri}/{name} cannot be written", self._policy)
        return starts, FileRecord(size=size, crc32=crc)

    def copy(self, name: str, parts: Callable[[], Iterable[bytes]]) -> FileRecord:
        """See `CheckpointSink.copy`."""

        def upload() -> FileRecord:
            with self._upload(name) as file:
                for part in parts():
                    file.write(part)
            return FileRecord(size=file.size, crc32=file.checksum)

        copied: FileRecord = retry(upload, f"{self._uri}/{name} cannot be written", self._policy)
        return copied

    def write(self, name: str, content: bytes) -> FileRecord:
        """See `CheckpointSink.write`."""
        path = f"{self._path}/{name}"
        retry(lambda: self._filesystem.pipe_file(path, content), f"{self._uri}/{name} cannot be written", self._policy)
        return FileRecord(size=len(content), crc32=zlib.crc32(content))

    @contextlib.contextmanager
    def _upload(self, name: str) -> Iterator[ChecksummedFile]:
        file = self._filesystem.open(f"{self._path}/{name}", "wb", block_size=PART_BYTES)
        try:
            yield ChecksummedFile(_InParts(file))
            file.close()
        except BaseException:
            # Leaving the file open would complete it, with what has been written so far, when it is collected.
            with contextlib.suppress(Exception):
                file.discard()
            with contextlib.suppress(AttributeError):
                file.closed = True
            raise


class _InParts:
    """Passes on what is written in pieces of a part, because back ends copy what they get."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for first in range(0, len(view), PART_BYTES):
            self._file.write(view[first : first + PART_BYTES])


class ObjectDirectory:
    """Names, commits and removes checkpoints under a URI. Only rank 0 changes anything, except through `sink`."""

    is_remote = True

    def __init__(self, filesystem: Any, path: str, uri: str, generation: int = 0, policy: RetryPolicy | None = None):
        self._filesystem = filesystem
        self._path = path.rstrip("/")
        self._uri = uri.rstrip("/")
        self._generation = generation
        self._policy = policy or RetryPolicy()
        self._losses: dict[str, float | None] = {}
        """Name -> the evaluation loss of a complete checkpoint that was read."""

    def __str__(self) -> str:
        return self._uri

    def steps(self) -> list[int]:
        """See `CheckpointStore.steps`."""
        return sorted(self._complete(), reverse=True)

    def files(self, step: int) -> ObjectFiles:
        """See `CheckpointStore.files`. For a step that is not complete: those of this generation."""
        return self._files(self._complete().get(step) or self._name(step))

    def location(self, step: int) -> str:
        """See `CheckpointStore.location`."""
        return f"{self._uri}/{self._name(step)}"

    def prepare(self, step: int) -> None:
        """See `CheckpointStore.prepare`."""
        newer_steps = [complete for complete in self.steps() if complete > step]
        if newer_steps:
            raise NewerCheckpointsError(
                f"{self._uri} has checkpoints of later steps than {step}, up to {newer_steps[0]}: load the newest "
                "before training, or save to an empty prefix"
            )
        self.make_place(step)

    def make_place(self, step: int) -> None:
        """See `CheckpointStore.make_place`. Credentials that may not delete are enough while nothing is there."""
        if self._name(step) in self._names():
            self._remove(self._name(step))

    def sink(self, step: int) -> ObjectSink:
        """See `CheckpointStore.sink`."""
        return self._sink(self._name(step))

    def commit(self, manifest: BaseManifest) -> None:
        """See `CheckpointStore.commit`."""
        self.complete(manifest.state.step, encode_manifest(manifest), manifest.files)

    def complete(self, step: int, manifest: bytes, files: Iterable[str]) -> None:
        """See `CheckpointStore.complete`."""
        self._losses.pop(self._name(step), None)
        self.sink(step).write(MANIFEST, manifest)

    def amend(self, manifest: BaseManifest) -> None:
        """See `CheckpointStore.amend`."""
        name = self._complete()[manifest.state.step]
        self._sink(name).write(MANIFEST, encode_manifest(manifest))

    def unfinished(self) -> dict[int, str]:
        """See `CheckpointStore.unfinished`."""
        complete = self._complete()
        names = [(match, name) for name in self._names() if (match := _CHECKPOINT.fullmatch(name))]
        return {
            int(match[1]): DAMAGED if self._exists(name, _DAMAGED) else INCOMPLETE
            for match, name in names
            if int(match[1]) not in complete
        }

    def saved_at(self, step: int) -> float | None:
        """See `CheckpointStore.saved_at`."""
        name = self._complete().get(step)
        return self._saved_at(name) if name is not None else None

    def _saved_at(self, name: str) -> float | None:
        def modified() -> float | None:
            try:
                moment = self._filesystem.modified(f"{self._path}/{name}/{MANIFEST}")
            except (NotImplementedError, FileNotFoundError):
                return None
            return float(moment.timestamp())

        found: float | None = retry(modified, f"{self._uri}/{name} cannot be listed", self._policy)
        return found

    def evaluation_losses(self) -> dict[int, float | None]:
        """See `CheckpointStore.evaluation_losses`."""
        return {step: self._evaluation_loss(name) for step, name in self._complete().items()}

    def _evaluation_loss(self, name: str) -> float | None:
        """That of a complete checkpoint. Its manifest is read once: only this process writes another one."""
        if name not in self._losses:
            self._losses[name] = read_evaluation_loss(self._files(name))
        return self._losses[name]

    def retain(self, retention: Retention) -> None:
        """See `CheckpointStore.retain`."""
        complete = self._complete()
        removed = removable(
            complete,
            retention,
            time.time(),
            lambda step: self._saved_at(complete[step]),
            lambda step: self._evaluation_loss(complete[step]),
        )
        retained = {name for step, name in complete.items() if step not in removed}
        newest = max(complete, default=-1)
        for name in self._names():
            match = _CHECKPOINT.fullmatch(name)
            # A later step that is not complete is being written.
            if match and name not in retained and int(match[1]) <= newest:
                self._remove(name)

    def discard(self, step: int) -> None:
        """See `CheckpointStore.discard`. What cannot be removed now is removed at the next start."""
        with contextlib.suppress(OSError):
            self._remove(self._name(step), RetryPolicy(attempts=1))

    def remove_newer(self, step: int) -> None:
        """See `CheckpointStore.remove_newer`."""
        for name in self._names():
            match = _CHECKPOINT.fullmatch(name)
            if match and int(match[1]) > step:
                self._remove(name)

    def clean(self) -> None:
        """See `CheckpointStore.clean`. What cannot be removed, as in a bucket that is locked, is no obstacle."""
        for name in self._names():
            if _CHECKPOINT.fullmatch(name) and not self._exists(name, MANIFEST):
                try:
                    self._remove(name)
                except OSError as error:
                    log.warning("an incomplete checkpoint stays, and takes space: %s", error)

    def quarantine(self, step: int) -> None:
        """See `CheckpointStore.quarantine`. The next `retain` removes it."""
        name = self._complete().get(step)
        if name is not None:
            self._sink(name).write(_DAMAGED, b"a file differs from what was written")

    def _name(self, step: int) -> str:
        return f"step-{step:08d}-g{self._generation}"

    def _sink(self, name: str) -> ObjectSink:
        return ObjectSink(self._filesystem, f"{self._path}/{name}", f"{self._uri}/{name}", self._policy)

    def _files(self, name: str) -> ObjectFiles:
        return ObjectFiles(self._filesystem, f"{self._path}/{name}", f"{self._uri}/{name}", self._policy)

    def _complete(self) -> dict[int, str]:
        """The name of the complete checkpoint of each step: that of the latest generation."""
        newest: dict[int, tuple[int, str]] = {}
        for name in self._names():
            match = _CHECKPOINT.fullmatch(name)
            if match and self._exists(name, MANIFEST) and not self._exists(name, _DAMAGED):
                step, generation = int(match[1]), int(match[2])
                newest[step] = max(newest.get(step, (-1, "")), (generation, name))
        return {step: name for step, (_, name) in newest.items()}

    def _names(self) -> list[str]:
        """The names directly below the root."""

        def listed() -> list[str]:
            self._filesystem.invalidate_cache()
            try:
                entries: list[str] = self._filesystem.ls(self._path, detail=False)
            except FileNotFoundError as error:
                if error_code(error) == "NoSuchBucket":
                    # Not the same as an empty one: the checkpoints are somewhere else.
                    raise CheckpointStoreError(errno.ENXIO, f"the bucket of {self._uri} does not exist") from error
                return []
            return sorted(entry.rstrip("/").rsplit("/", 1)[-1] for entry in entries)

        names: list[str] = retry(listed, f"{self._uri} cannot be listed", self._policy)
        return names

    def _exists(self, name: str, file: str) -> bool:
        def exists() -> bool:
            try:
                self._filesystem.info(f"{self._path}/{name}/{file}")
            except FileNotFoundError:
                return False
            return True

        found: bool = retry(exists, f"{self._uri}/{name} cannot be listed", self._policy)
        return found

    def _remove(self, name: str, policy: RetryPolicy | None = None) -> None:
        def remove() -> None:
            self._filesystem.invalidate_cache()
            path = f"{self._path}/{name}"
            with contextlib.suppress(FileNotFoundError):
                self._filesystem.rm_file(f"{path}/{MANIFEST}")
            with contextlib.suppress(FileNotFoundError):
                self._filesystem.rm(path, recursive=True)

        retry(remove, f"{self._uri}/{name} cannot be removed", policy or self._policy)
