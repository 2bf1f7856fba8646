"""Saves in the background: stage a copy, write it in a thread, commit when every rank's bytes are durable.

At most one save is in progress. The next one waits for it on every rank, so that no rank decides by its own clock. The
thread's collectives use a separate group.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save

from meshwright_worker.checkpoint.binary_index import BINARY_INDEX
from meshwright_worker.checkpoint.collective_errors import on_first_rank
from meshwright_worker.checkpoint.dcp_storage import CheckpointWriter
from meshwright_worker.checkpoint.errors import CheckpointError, describe_failed_save
from meshwright_worker.checkpoint.manifest import BINARY_INDEX_FORMAT, FORMAT, BaseManifest, FileRecord
from meshwright_worker.checkpoint.state_dict import stage_copy
from meshwright_worker.checkpoint.store import Tier
from meshwright_worker.distributed.device import use_device
from meshwright_worker.distributed.mesh import Mesh

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint that has become durable."""

    step: int
    path: str
    """Path or URI."""
    seconds: float
    tier: Tier


@dataclass(frozen=True, slots=True)
class FailedSave:
    """A checkpoint that could not be saved on a tier; the same on every rank."""

    step: int
    tier: Tier
    error: BaseException


class AsyncCheckpointer:
    """Saves this rank's part of the checkpoints of one mesh generation, on one tier after the other."""

    def __init__(self, tiers: Sequence[Tier], mesh: Mesh) -> None:
        self._tiers = tiers
        self._mesh = mesh
        self._staged: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._saved: deque[SavedCheckpoint] = deque()
        self._failed: list[FailedSave] = []

    def begin(
        self, tensors: dict[str, torch.Tensor], manifest: BaseManifest, tiers: Sequence[Tier] | None = None
    ) -> None:
        """Start to save on `tiers`, by default on all; returns once a copy is staged. Collective.

        Call `take_finished` before and between.
        """
        if self._thread is not None:
            raise CheckpointError("a save is still in progress")
        staged = stage_copy(tensors, self._staged)
        self._thread = threading.Thread(
            target=self._run,
            args=(staged, manifest, self._tiers if tiers is None else tiers),
            name="checkpoint",
            daemon=True,
        )
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether this rank's part of a save is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, seconds: float) -> bool:
        """Wait for this rank's part of the save in progress, for a limited time. Whether it has ended."""
        if self._thread is not None:
            self._thread.join(seconds)
        return not self.busy

    def take_outcomes(self, *, wait: bool) -> tuple[list[SavedCheckpoint], list[FailedSave]]:
        """Return what has become durable since the last call, and what failed; with `wait`, wait for the save in
        progress. What failed is known, and the same on every rank, once the save has ended on all tiers.
        """
        failed: list[FailedSave] = []
        if self._thread is not None and (wait or not self._thread.is_alive()):
            self._thread.join()
            self._thread = None
            failed, self._failed = self._failed, []
        return [self._saved.popleft() for _ in range(len(self._saved))], failed

    def take_finished(self, *, wait: bool) -> list[SavedCheckpoint]:
        """`take_outcomes`, if a failed save is an error.

        Raises:
            CheckpointError: it failed on a tier, on this rank or another.
        """
        saved, failed = self.take_outcomes(wait=wait)
        if failed:
            raise save_error(failed)
        return saved

    def _run(self, tensors: dict[str, torch.Tensor], manifest: BaseManifest, tiers: Sequence[Tier]) -> None:
        use_device(self._mesh.device)
        step = manifest.state.step
        for tier in tiers:
            started = time.monotonic()
            try:
                self._write(tensors, manifest, tier)
                seconds = time.monotonic() - started
                self._saved.append(SavedCheckpoint(step, tier.store.location(step), seconds, tier))
            # torch's CheckpointException does not inherit from Exception; the training thread raises any error.
            except BaseException as error:
                self._failed.append(FailedSave(step, tier, error))
                if self._mesh.rank == 0:
                    tier.store.discard(step)

    def _write(self, tensors: dict[str, torch.Tensor], manifest: BaseManifest, tier: Tier) -> None:
        step, store = manifest.state.step, tier.store

        def prepare() -> None:
            store.prepare(step)  # without its result: a path of one machine is nothing to the others

        on_first_rank(prepare, self._mesh)
        save(
            tensors,
            storage_writer=CheckpointWriter(store.sink(step), self._mesh.rank, _commit_of(manifest, tier)),
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=self._mesh.checkpoint_group,
        )


def _commit_of(manifest: BaseManifest, tier: Tier) -> Callable[[dict[str, FileRecord]], None]:
    def commit(files: dict[str, FileRecord]) -> None:
        written = BINARY_INDEX_FORMAT if BINARY_INDEX in files else FORMAT
        tier.store.commit(manifest.model_copy(update={"files": files, "format": written}))
        try:
            tier.store.retain(tier.retention)
        except OSError as error:  # this checkpoint is complete, and the next save tries again
            log.warning("older checkpoints cannot be removed: %s", error)

    return commit


def save_error(failed: Sequence[FailedSave]) -> CheckpointError:
    """The error of saves that failed. Raise it from the first one's."""
    causes = "; ".join(describe_failed_save(one.error) for one in failed)
    error = CheckpointError(f"a checkpoint could not be written: {causes}")
    error.__cause__ = failed[0].error
    return error
