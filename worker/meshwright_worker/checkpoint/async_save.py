"""Saves in the background: stage a copy, write it, commit when every rank's bytes are durable.

A thread of each rank agrees with the others, in a separate group. What needs no other rank, planning and writing, runs
in the rank's writer process if it has one (`writer_process.py`), otherwise in the thread. At most one save is in
progress: rank 0 says so to all ranks (`schedule.py`), and a save that begins nevertheless waits on every rank.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import WriteItem

from meshwright_worker.checkpoint.binary_index import BINARY_INDEX
from meshwright_worker.checkpoint.collective_errors import collected, on_all_ranks
from meshwright_worker.checkpoint.dcp_storage import file_of_rank
from meshwright_worker.checkpoint.manifest import BINARY_INDEX_FORMAT, FORMAT, BaseManifest, FileRecord
from meshwright_worker.checkpoint.save_plan import (
    GlobalPlan,
    Layout,
    encode_plan,
    global_plan,
    layout_of,
    local_plan,
    tensors_to_write,
)
from meshwright_worker.checkpoint.state_dict import LaterCopy, allocate_copy, copy_tensors
from meshwright_worker.checkpoint.store import CheckpointStore, Tier
from meshwright_worker.checkpoint.writer_process import Executor, executor_of_this_process
from meshwright_worker.checkpoint_errors import CheckpointError, describe_failed_save
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


@dataclass(frozen=True, slots=True)
class _Planned:
    """What this rank writes, as long as its tensors have this layout."""

    layout: Layout
    items: list[WriteItem]
    index: tuple[str, bytes] | None
    """Name and content of the index; only on rank 0."""


class AsyncCheckpointer:
    """Saves this rank's part of the checkpoints of one mesh generation, on one tier after the other."""

    def __init__(self, tiers: Sequence[Tier], mesh: Mesh, executor: Executor | None = None) -> None:
        self._tiers = tiers
        self._mesh = mesh
        self._executor = executor or executor_of_this_process()
        self._planned: _Planned | None = None
        self._copy_error: BaseException | None = None
        self._staged: dict[str, torch.Tensor] = {}
        self._copied = threading.Event()
        self._copied.set()
        self._thread: threading.Thread | None = None
        self._saved: deque[SavedCheckpoint] = deque()
        self._failed: list[FailedSave] = []

    def begin(
        self,
        tensors: dict[str, torch.Tensor],
        manifest: BaseManifest,
        tiers: Sequence[Tier] | None = None,
        unchanged: Container[str] = (),
    ) -> None:
        """Start to save on `tiers`, by default on all; returns once a copy is staged. Collective.

        Call `take_finished` before and between. The tensors that `unchanged` names are copied later: do not change them
        before `wait_for_copy` returns.
        """
        if self._thread is not None:
            raise CheckpointError("a save is still in progress")
        staged = allocate_copy(tensors, self._staged, self._executor.memory)
        later = {name: tensor for name, tensor in tensors.items() if name in unchanged}
        copy_tensors({name: tensor for name, tensor in tensors.items() if name not in later}, staged)
        copy = LaterCopy(later, staged, self._mesh.device) if later else None
        if copy is not None:
            self._copied.clear()
        self._thread = threading.Thread(
            target=self._run,
            args=(copy, staged, manifest, self._tiers if tiers is None else tiers),
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

    def wait_for_copy(self) -> None:
        """Wait until the tensors of the save in progress may change."""
        self._copied.wait()

    def _run(
        self,
        copy: LaterCopy | None,
        tensors: dict[str, torch.Tensor],
        manifest: BaseManifest,
        tiers: Sequence[Tier],
    ) -> None:
        use_device(self._mesh.device)
        step = manifest.state.step
        self._copy_error = None
        if copy is not None:
            try:
                copy.run()
            except BaseException as error:  # the other ranks wait for this one: `_write` raises it
                self._copy_error = error
            self._copied.set()
        for tier in tiers:
            started = time.monotonic()
            try:
                self._write(tensors, manifest, tier)
                seconds = time.monotonic() - started
                self._saved.append(SavedCheckpoint(step, tier.store.location(step), seconds, tier))
            except BaseException as error:  # the training thread judges it
                self._failed.append(FailedSave(step, tier, error))
                if self._mesh.rank == 0:
                    tier.store.discard(step)

    def _write(self, tensors: dict[str, torch.Tensor], manifest: BaseManifest, tier: Tier) -> None:
        step, store, layout = manifest.state.step, tier.store, layout_of(tensors)

        def prepare() -> bool:
            if self._mesh.rank == 0:
                store.prepare(step)
            return self._planned is not None and self._planned.layout == layout

        # Every rank has the same answers, so that all of them plan, or none.
        planned = self._planned if all(on_all_ranks(prepare, self._mesh)) else None
        self._planned = planned = planned or self._plan(tensors, layout)
        file = file_of_rank(self._mesh.rank)

        def write() -> dict[str, FileRecord]:
            if self._copy_error is not None:
                raise self._copy_error
            content = tensors_to_write(planned.items, tensors)
            return {file: self._executor.run(write_file, store, step, file, content)} if content else {}

        def commit(written: list[dict[str, FileRecord]]) -> list[None]:
            assert planned.index is not None
            files = {name: record for files in written for name, record in files.items()}
            commit_checkpoint(manifest, tier, files, *planned.index)
            return [None] * len(written)

        collected(write, commit, self._mesh)

    def _plan(self, tensors: dict[str, torch.Tensor], layout: Layout) -> _Planned:
        """Agree which rank writes which box. Collective."""
        items: list[WriteItem] = []
        index: list[tuple[str, bytes]] = []

        def describe() -> bytes:
            items.extend(local_plan(tensors, is_coordinator=self._mesh.rank == 0))
            return encode_plan(items)

        def plan(local_plans: list[bytes]) -> list[list[int]]:
            found: GlobalPlan = self._executor.run(global_plan, local_plans)
            index.append((found.index_name, found.index))
            return found.kept

        kept = collected(describe, plan, self._mesh)
        return _Planned(layout, [items[position] for position in kept], index[0] if index else None)


def write_file(store: CheckpointStore, step: int, file: str, tensors: dict[str, torch.Tensor]) -> FileRecord:
    """Write a rank's file of the checkpoint of a step."""
    return store.sink(step).write_tensors(file, tensors)[1]


def commit_checkpoint(
    manifest: BaseManifest, tier: Tier, files: dict[str, FileRecord], index_name: str, index: bytes
) -> None:
    """Complete a checkpoint whose files of tensors are written, and remove older ones of its tier."""
    step = manifest.state.step
    files = {**files, index_name: tier.store.sink(step).write(index_name, index)}
    written = BINARY_INDEX_FORMAT if index_name == BINARY_INDEX else FORMAT
    tier.store.commit(manifest.model_copy(update={"files": files, "format": written}))
    try:
        tier.store.retain(tier.retention)
    except OSError as error:  # this checkpoint is complete, and the next save tries again
        log.warning("older checkpoints cannot be removed: %s", error)


def save_error(failed: Sequence[FailedSave]) -> CheckpointError:
    """The error of saves that failed. Raise it from the first one's."""
    causes = "; ".join(describe_failed_save(one.error) for one in failed)
    error = CheckpointError(f"a checkpoint could not be written: {causes}")
    error.__cause__ = failed[0].error
    return error
