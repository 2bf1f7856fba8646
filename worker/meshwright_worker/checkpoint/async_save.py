"""Saves in the background: stage a copy, write it in a thread, commit when every rank's bytes are on the disk.

At most one save is in progress. The next one waits for it on every rank, so that no rank decides by its own clock. The
thread's collectives use a separate group.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

from meshwright_worker.checkpoint.binary_index import BINARY_INDEX
from meshwright_worker.checkpoint.collective_errors import on_first_rank
from meshwright_worker.checkpoint.dcp_storage import CheckpointWriter
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.errors import CheckpointError, describe_failed_save
from meshwright_worker.checkpoint.manifest import BINARY_INDEX_FORMAT, FORMAT, BaseManifest, FileRecord
from meshwright_worker.checkpoint.state_dict import stage_copy
from meshwright_worker.distributed.device import use_device
from meshwright_worker.distributed.mesh import Mesh

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that has become durable."""

    step: int
    path: Path
    seconds: float


class AsyncCheckpointer:
    """Saves this rank's part of the checkpoints of one mesh generation."""

    def __init__(self, directory: CheckpointDirectory, keep: int, mesh: Mesh) -> None:
        self._directory = directory
        self._keep = keep
        self._mesh = mesh
        self._staged: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._result: SavedCheckpoint | BaseException | None = None

    def begin(self, tensors: dict[str, torch.Tensor], manifest: BaseManifest) -> None:
        """Start to save; returns once a copy is staged. Collective. Call `take_finished` before and between."""
        if self._thread is not None:
            raise CheckpointError("a save is still in progress")
        staged = stage_copy(tensors, self._staged)
        self._thread = threading.Thread(target=self._run, args=(staged, manifest), name="checkpoint", daemon=True)
        self._thread.start()

    def take_finished(self, *, wait: bool) -> SavedCheckpoint | None:
        """Return the save that finished since the last call, or None; with `wait`, wait for the one in progress.

        Raises:
            CheckpointError: it failed, on this rank or another.
        """
        if self._thread is None or (self._thread.is_alive() and not wait):
            return None
        self._thread.join()
        self._thread = None
        result, self._result = self._result, None
        if isinstance(result, BaseException):
            raise CheckpointError(f"a checkpoint could not be written: {describe_failed_save(result)}") from result
        return result

    def _run(self, tensors: dict[str, torch.Tensor], manifest: BaseManifest) -> None:
        started = time.monotonic()
        use_device(self._mesh.device)
        step = manifest.state.step
        try:
            self._write(tensors, manifest)
            self._result = SavedCheckpoint(step, self._directory.path(step), time.monotonic() - started)
        # torch's CheckpointException does not inherit from Exception; the training thread raises any error.
        except BaseException as error:
            self._result = error

    def _write(self, tensors: dict[str, torch.Tensor], manifest: BaseManifest) -> None:
        group = self._mesh.checkpoint_group
        step = manifest.state.step
        on_first_rank(partial(self._directory.prepare, step), self._mesh)
        save(
            tensors,
            storage_writer=CheckpointWriter(
                self._directory.temporary(step), self._mesh.rank, self._commit_of(manifest)
            ),
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
        )

    def _commit_of(self, manifest: BaseManifest) -> Callable[[dict[str, FileRecord]], None]:
        def commit(files: dict[str, FileRecord]) -> None:
            written = BINARY_INDEX_FORMAT if BINARY_INDEX in files else FORMAT
            self._directory.commit(manifest.model_copy(update={"files": files, "format": written}))
            self._directory.retain(self._keep)

        return commit
