"""Checkpoints for the training loop: which one to load, and what to save when."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.api.checkpoint import CheckpointSpec, Staging, StoreSpec
from meshwright.protocol.messages import FailureHistory
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.checkpoint.async_save import AsyncCheckpointer, FailedSave, SavedCheckpoint, save_error
from meshwright_worker.checkpoint.collective_errors import on_first_rank
from meshwright_worker.checkpoint.files import CheckpointPath
from meshwright_worker.checkpoint.island_tensors import island_tensors
from meshwright_worker.checkpoint.loader import (
    allocate_tensors,
    check_same_run,
    check_step,
    load_tensors,
    newest_of_all,
    read_intact,
    tensor_names,
)
from meshwright_worker.checkpoint.manifest import (
    LayoutRecord,
    Manifest,
    Origin,
    TrainingState,
    origin_of,
    read_manifest,
)
from meshwright_worker.checkpoint.other_run import checkpoint_of_other_run
from meshwright_worker.checkpoint.provenance import branched, continued
from meshwright_worker.checkpoint.schedule import CheckpointSchedule
from meshwright_worker.checkpoint.state_dict import checkpoint_tensors, copy_to_duplicates
from meshwright_worker.checkpoint.store import CheckpointStore, Tier, open_store
from meshwright_worker.checkpoint_errors import (
    DamagedCheckpointError,
    NewerCheckpointsError,
    describe_failed_save,
    is_storage_failure,
)
from meshwright_worker.data.sample_order import MODULUS
from meshwright_worker.distributed.mesh import Mesh
from meshwright_worker.local_sgd.outer_optimizer import OuterOptimizer
from meshwright_worker.optimizers.optimizer import Optimizer
from meshwright_worker.parallel.data.compression.state import CompressionState
from meshwright_worker.parallel.shards import ParameterShard
from meshwright_worker.rank.task import AT_WORK_SECONDS, RankEvents, RankTask, TierReport, WorkProgress

log = logging.getLogger(__name__)


class CheckpointManager:
    """The checkpoints of one rank in one mesh generation. Every method is collective."""

    def __init__(
        self,
        task: RankTask[NativeRun],
        spec: CheckpointSpec,
        mesh: Mesh,
        events: RankEvents,
        template: Manifest,
    ) -> None:
        self._spec = spec
        self._mesh = mesh
        self._events = events
        self._template = template
        self._claim = str(Path(task.checkpoint_dir).parent) if task.checkpoint_dir is not None else ""
        """Where the claim of the checkpoints is mounted."""
        self._steps = task.run.training.steps
        self._tiers = tiers_of(task, spec)
        self._saver = AsyncCheckpointer(self._tiers, mesh)
        self._schedule = CheckpointSchedule(self._tiers, task.history or FailureHistory())
        self._newest = -1
        """The step that was saved or loaded last, or that is being saved."""
        self._durable = -1
        """The newest step that is complete on a tier."""
        self._reported = -1
        self._loaded: Manifest | None = None
        self._source = ""
        """The checkpoint of another run that was loaded."""
        self._from_memory = False
        """Whether the state is not that of a checkpoint: there may be checkpoints of later steps."""

    def load(
        self,
        shards: Sequence[ParameterShard],
        optimizer: Optimizer,
        buffers: Mapping[str, torch.Tensor] | None = None,
        outer: OuterOptimizer | None = None,
        compression_state: CompressionState | None = None,
        *,
        progress: WorkProgress | None = None,
    ) -> TrainingState:
        """Fill model and optimizer from the newest intact checkpoint, or, if there is none, from that of another run
        that the spec names. Return the state to resume from; step 0 without either.

        `compression_state` is restored too, if the checkpoint contains it for this layout. `progress` counts the
        bytes that are read.

        Raises:
            CheckpointMismatchError: it belongs to another run, or has the name of another step.
            CheckpointVolumeError, ForeignCheckpointError: as `newest_intact`.
            ResumeSourceError: training cannot begin from the checkpoint of another run.
        """
        found = self._checkpoint_to_load(progress)
        if found is None:
            return TrainingState()
        path, newest_manifest = found
        self._loaded = newest_manifest
        # The adapters belong to weights that are drawn again as they were at the beginning of the run.
        self._template = self._template.model_copy(update={"weights_in_tiles": newest_manifest.weights_in_tiles})
        if outer is None:
            tensors = checkpoint_tensors(shards, optimizer, buffers)
        else:
            tensors = island_tensors(shards, outer, self._mesh.island, buffers, tensor_names(path))
        residuals = allocate_tensors(path, compression_state.owns) if compression_state is not None else {}
        load_tensors({**tensors, **residuals}, path, self._mesh.checkpoint_group, progress)
        if compression_state is not None:
            compression_state.load_state_dict(residuals)
        copy_to_duplicates(shards, optimizer)
        if outer is not None and (owner := outer.checkpointed_optimizer()) is not None:
            copy_to_duplicates(*owner)
        optimizer.set_step_count(newest_manifest.state.step - newest_manifest.state.skipped)
        if not self._source:
            self._newest = newest_manifest.state.step
            return newest_manifest.state
        if self._mesh.rank == 0:
            log.info("resumed from %s step %d", self._source, newest_manifest.state.step)
        # Its evaluation is the other run's: it does not compete with those of this one.
        return newest_manifest.state.model_copy(update={"evaluation_loss": None})

    def _checkpoint_to_load(self, progress: WorkProgress | None) -> tuple[CheckpointPath, Manifest] | None:
        """The newest intact checkpoint of this run; without one, that of `resumeFrom`. Collective."""
        named = self._spec.resume_from
        otherwise = f"reading `checkpoint.resumeFrom: {named}`" if named is not None else "starting at step 0"
        newest = newest_of_all([tier.store for tier in self._tiers], self._mesh, Manifest, progress, otherwise)
        if newest is not None:
            store, manifest = newest
            check_same_run(manifest, self._template)
            if named is not None and self._mesh.rank == 0:
                log.info("`checkpoint.resumeFrom` is not read: there is a checkpoint in %s", store)
            return store.files(manifest.state.step), manifest
        if named is None:
            return None
        path, manifest = checkpoint_of_other_run(
            self._spec, self._claim, self._mesh, self._template, self._steps, progress
        )
        self._source = str(path)
        return path, manifest

    @property
    def source(self) -> str:
        """The checkpoint of another run that was loaded; empty if none was."""
        return self._source

    @property
    def draws_tiles(self) -> bool:
        """Whether the frozen random weights of a run that was loaded are drawn in tiles."""
        return self._template.weights_in_tiles

    def adapters_belong_to(self, base_fingerprint: str | None) -> None:
        """Record the weights on which this run trains adapters, before `load`, which compares them. Not collective."""
        self._template = self._template.model_copy(update={"base_fingerprint": base_fingerprint})

    def go_back(
        self, step: int, at_least: int, change: Callable[[TrainingState], TrainingState]
    ) -> TrainingState | None:
        """Make an older checkpoint than `step` the latest one, with its state changed by `change`: the first intact one
        in the order of `checkpoints_to_go_back_to`. Later ones are removed, but not before it is verified.

        Returns:
            Its state. None if there is none, and nothing was removed.

        Raises:
            CheckpointError: a save in progress failed.
            CheckpointMismatchError, CheckpointVolumeError, ForeignCheckpointError: as `newest_intact`.
        """
        self.report(wait=True)
        stores, progress = [tier.store for tier in self._tiers], WorkProgress(self._events)
        listed = on_first_rank(lambda: [store.steps() for store in stores], self._mesh) or []
        for target in checkpoints_to_go_back_to({found for steps in listed for found in steps}, step, at_least):
            having = [store for store, steps in zip(stores, listed, strict=True) if target in steps]
            intact = [manifest for store in having if (manifest := self._intact(store, target, progress)) is not None]
            if not intact:
                continue
            state = change(intact[0].state)
            for store in stores:
                on_first_rank(partial(store.remove_newer, target), self._mesh)
            for store in having:
                on_first_rank(partial(_amend, store, target, state), self._mesh)
            return state
        return None

    def _intact(self, store: CheckpointStore, step: int, progress: WorkProgress) -> Manifest | None:
        """The manifest of a checkpoint; None if it is damaged, and hidden now. Collective."""
        checkpoint = store.files(step)
        try:
            manifest = read_intact(checkpoint, self._mesh, Manifest, progress)
            check_step(checkpoint, step, manifest)
            return manifest
        except DamagedCheckpointError as error:
            if self._mesh.rank == 0:
                log.warning("%s; it is not the one to go back to", error)
        on_first_rank(partial(store.quarantine, step), self._mesh)
        return None

    @property
    def tiers(self) -> Sequence[Tier]:
        """Where checkpoints are saved."""
        return self._tiers

    def resumed(self, step: int, held: Origin | None = None) -> None:
        """Training goes on after `step`, from what was loaded, or from memory: then `held` is what the ranks hold about
        the beginning of the run. Not collective.
        """
        self._from_memory = self._loaded is None and step > 0
        if held is not None:
            kept = {"base_fingerprint": held.base_fingerprint, "weights_in_tiles": held.weights_in_tiles}
            self._template = self._template.model_copy(update=kept)
        if self._mesh.rank != 0:
            return
        self._schedule.resumed(step)
        own = self._template.provenance
        if own is not None and step > 0:
            before = self._loaded if self._loaded is not None else held
            known = before.provenance if before is not None else None
            if self._source and self._loaded is not None:
                record = branched(self._source, step, self._loaded.state.digest, known, own)
            else:
                record = continued(known, own, step)
            self._template = self._template.model_copy(update={"provenance": record})

    def overdue(self, step: int) -> list[int]:
        """The tiers whose last checkpoint was interrupted, if ranks go on after `step` from memory. Collective."""
        if not self._from_memory:
            return []
        return on_first_rank(lambda: self._schedule.overdue(step), self._mesh) or []

    def origin(self) -> Origin | None:
        """What checkpoints to come say about the beginning, on every rank, so that it outlives rank 0. Collective."""
        return on_first_rank(lambda: origin_of(self._template), self._mesh)

    def wait_before(self, step: int) -> None:
        """On rank 0: let a save in progress end before a step after which another one is due. Not collective."""
        if self._mesh.rank == 0:
            self._schedule.wait_before(step, self._saver.busy, self._saver.wait)

    @property
    def keeps_best(self) -> bool:
        """Whether a tier retains the checkpoints with the lowest evaluation loss."""
        return any(tier.retention.best is not None for tier in self._tiers)

    def list_best(self) -> None:
        """On rank 0: list the best checkpoints, for `forget_removed`, while ranks evaluate. Not collective."""
        if self._mesh.rank == 0:
            self._schedule.list_best()

    def forget_removed(self) -> None:
        """On rank 0: forget the best checkpoints that are not there any more. Waits, but not for long. Not
        collective.
        """
        if self._mesh.rank == 0:
            self._schedule.forget_removed()

    def best_tiers(self, step: int, loss: float) -> list[int]:
        """On rank 0: the tiers that need a checkpoint of `step`, because its evaluation loss is among the lowest. Waits
        for a save in progress, but not for long. Not collective.
        """
        if self._mesh.rank != 0:
            return []
        return self._schedule.best_tiers(step, loss, self._saver.busy, self._saver.wait)

    def flags(self) -> int:
        """What rank 0 tells all ranks in the step that begins now (see `schedule`); 0 on others. Not collective."""
        return self._schedule.flags(self._saver.busy) if self._mesh.rank == 0 else 0

    def reports(self) -> tuple[TierReport, ...] | None:
        """On rank 0, the tiers, if something about them has changed since the last call. Not collective."""
        return self._schedule.reports() if self._mesh.rank == 0 else None

    def save(
        self,
        shards: Sequence[ParameterShard],
        optimizer: Optimizer,
        state: TrainingState,
        buffers: Mapping[str, torch.Tensor] | None = None,
        outer: OuterOptimizer | None = None,
        compression_state: CompressionState | None = None,
        *,
        wait: bool,
        tiers: Sequence[int] | None = None,
        updates_wait: bool = False,
    ) -> None:
        """Save `state`, whose digest is this rank's part, on some tiers, by default on all. Returns at once; with
        `wait`, when it is durable. A state of the step that was saved or loaded last is not saved again. With
        `updates_wait`, parameters and moments do not change before `wait_for_copy` returns, so that they may be copied
        later.

        Raises:
            CheckpointError: this save, or an earlier one, failed, and not only because of the storage. With `wait`:
                it failed on every tier.
        """
        began = time.monotonic()
        self.report(wait=True)
        if state.step != self._newest:
            self._newest = state.step
            full_state = state.model_copy(update={"digest": self._sum_digest(state.digest)})
            manifest = self._template.model_copy(update={"state": full_state})
            if outer is None:
                tensors = checkpoint_tensors(shards, optimizer, buffers)
            else:
                tensors = island_tensors(shards, outer, self._mesh.island, buffers)
            residuals = compression_state.tensors() if compression_state is not None else {}
            due = range(len(self._tiers)) if tiers is None else tiers
            overlaps = updates_wait and not wait and self._spec.staging is Staging.OVERLAPPED
            unchanged = checkpoint_tensors(shards, optimizer) if overlaps else {}
            self._saver.begin({**tensors, **residuals}, manifest, [self._tiers[tier] for tier in due], unchanged)
            losses = {state.step: state.evaluation_loss} if state.evaluation_loss is not None else {}
            self._schedule.begun(due, time.monotonic() - began, losses)
        if wait and (failed := self.report(wait=True)) and self._durable != state.step:
            raise save_error(failed)

    @property
    def saves(self) -> bool:
        """Whether a save is in progress on this rank."""
        return self._saver.busy

    def wait_for_copy(self) -> None:
        """Wait until parameters and moments may change again. Not collective."""
        self._saver.wait_for_copy()

    def report(self, *, wait: bool = False) -> Sequence[FailedSave]:
        """Report saves that have become durable or failed; with `wait`, wait for the one in progress.

        Returns:
            What failed because of the storage: training goes on, and saves again when the tier is due again.

        Raises:
            CheckpointError: a save failed for another reason.
        """
        while wait and not self._saver.wait(AT_WORK_SECONDS):
            self._events.at_work()
        saved, unsaved = self._saver.take_outcomes(wait=wait)
        for one in saved:
            self._durable = max(self._durable, one.step)
            self._report_saved(one)
        failed = [one for one in unsaved if not self._is_needless(one)]
        if any(not is_storage_failure(one.error) for one in failed):
            raise save_error(failed)
        for missed in failed:
            if self._newest == missed.step != self._durable:
                self._newest = -1
            text = describe_failed_save(missed.error)
            self._schedule.failed(missed.tier, text)
            if self._mesh.rank == 0:
                where = missed.tier.store
                log.warning("no checkpoint of step %d in %s; training continues: %s", missed.step, where, text)
        return failed

    def _is_needless(self, unsaved: FailedSave) -> bool:
        """Whether ranks that went back in memory have come past a step of which there is a later checkpoint."""
        if not self._from_memory or not isinstance(unsaved.error, NewerCheckpointsError):
            return False
        self._schedule.not_needed(unsaved.tier)
        if self._mesh.rank == 0:
            log.info("no checkpoint of step %d in %s, which has later ones", unsaved.step, unsaved.tier.store)
        return True

    def _report_saved(self, saved: SavedCheckpoint) -> None:
        self._schedule.saved(saved.tier, saved.step, saved.seconds)
        if self._mesh.rank != 0:
            return
        if saved.step > self._reported:
            self._reported = saved.step
            self._events.checkpoint(saved.step, saved.path, saved.seconds)
        else:
            log.info("checkpoint copied step=%d seconds=%.2f path=%s", saved.step, saved.seconds, saved.path)

    def _sum_digest(self, digest: int) -> int:
        # int64 sums wrap modulo 2^64, which 2^63 divides.
        total = torch.tensor([digest], dtype=torch.int64)
        dist.all_reduce(total, group=self._mesh.checkpoint_group)
        return int(total.item()) % MODULUS


def tiers_of(task: RankTask[NativeRun], spec: CheckpointSpec) -> list[Tier]:
    """Where the job's checkpoints are, the fastest first.

    Raises:
        UnusableStoreError, CheckpointStoreError: as `open_store`.
    """
    tiers = []
    if task.checkpoint_dir is not None:
        volume = open_store(task.checkpoint_dir, task.generation)
        tiers.append(Tier(volume, spec.retention_of(), spec.interval_of()))
    if task.checkpoint_uri is not None:
        options = spec.store or StoreSpec()
        store = open_store(task.checkpoint_uri, task.generation, options, "checkpoint.uri")
        tiers.append(Tier(store, spec.retention_of(options), spec.interval_of(options)))
    return tiers


def checkpoints_to_go_back_to(steps: Iterable[int], step: int, at_least: int) -> list[int]:
    """The steps of the checkpoints before `step`, in the order in which they are tried: those that are `at_least` so
    many steps older, the newest first; then the others, the oldest first.
    """
    earlier = sorted(found for found in steps if found < step)
    far = [found for found in earlier if found <= step - at_least]
    return far[::-1] + earlier[len(far) :]


def _amend(store: CheckpointStore, step: int, state: TrainingState) -> None:
    """Change the state in the manifest of a complete checkpoint that is there still. Its files stay."""
    if step in store.steps():
        store.amend(read_manifest(store.files(step)).model_copy(update={"state": state}))


def manifest_template(run: NativeRun, stream: str, mesh: Mesh) -> Manifest:
    """Return the part of the manifest that all checkpoints of this generation share."""
    training = run.training
    layout = LayoutRecord(
        tensor=mesh.layout.tensor,
        pipeline=mesh.layout.pipeline,
        data=mesh.layout.data,
        context=mesh.layout.context,
        expert=mesh.layout.expert,
        zero_stage=run.parallelism.zero_stage_or_default,
    )
    return Manifest(
        state=TrainingState(),
        architecture=run.architecture,
        seed=training.seed,
        sequence_length=training.sequence_length,
        stream=stream,
        layout=layout,
        # What the checkpoint contains does not depend on where its adapters began.
        lora=training.lora and training.lora.model_copy(update={"initial_adapter": None}),
        initial_weights=training.initial_weights if training.lora else None,
        weights_in_tiles=training.lora is not None and training.initial_weights is None,
    )
