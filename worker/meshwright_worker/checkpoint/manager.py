"""Checkpoints for the training loop: which one to load, and what to save when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.api.spec import CheckpointSpec
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.checkpoint.async_save import AsyncCheckpointer
from meshwright_worker.checkpoint.collective_errors import on_all_ranks, on_first_rank
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.loader import (
    allocate_tensors,
    check_same_run,
    load_tensors,
    newest_intact,
    tensor_names,
)
from meshwright_worker.checkpoint.manifest import LayoutRecord, Manifest, TrainingState
from meshwright_worker.checkpoint.state_dict import checkpoint_tensors, copy_to_duplicates
from meshwright_worker.data.sample_order import MODULUS
from meshwright_worker.distributed.mesh import Mesh
from meshwright_worker.local_sgd.outer_optimizer import OuterOptimizer, local_sgd_tensors
from meshwright_worker.optimizers.optimizer import Optimizer
from meshwright_worker.parallel.data.compression.state import CompressionState
from meshwright_worker.parallel.shards import ParameterShard
from meshwright_worker.rank.task import RankEvents, RankTask


class CheckpointManager:
    """The checkpoints of one rank in one mesh generation. Every method is collective."""

    def __init__(
        self,
        task: RankTask[NativeRun],
        spec: CheckpointSpec,
        root: str,
        mesh: Mesh,
        events: RankEvents,
        template: Manifest,
    ) -> None:
        self._spec = spec
        self._mesh = mesh
        self._events = events
        self._template = template
        self._directory = CheckpointDirectory(Path(root), task.generation)
        self._saver = AsyncCheckpointer(self._directory, spec.retained, mesh)
        self._newest = -1

    def load(
        self,
        shards: Sequence[ParameterShard],
        optimizer: Optimizer,
        buffers: Mapping[str, torch.Tensor] | None = None,
        outer: OuterOptimizer | None = None,
        compression_state: CompressionState | None = None,
    ) -> TrainingState:
        """Fill model and optimizer from the newest intact checkpoint. Return the state to resume from; step 0 without
        one.

        `compression_state` is restored too, if the checkpoint contains it for this layout.

        Raises:
            CheckpointMismatchError: it belongs to another run.
            CheckpointVolumeError, ForeignCheckpointError: as `newest_intact`.
        """
        newest_manifest = newest_intact(self._directory, self._mesh, Manifest)
        if newest_manifest is None:
            return TrainingState()
        check_same_run(newest_manifest, self._template)
        path = self._directory.path(newest_manifest.state.step)
        if outer is None:
            tensors = checkpoint_tensors(shards, optimizer, buffers)
        else:
            tensors = local_sgd_tensors(shards, outer, self._mesh.island, tensor_names(path))
        residuals = allocate_tensors(path, compression_state.owns) if compression_state is not None else {}
        load_tensors({**tensors, **residuals}, path, self._mesh.checkpoint_group)
        if compression_state is not None:
            compression_state.load_state_dict(residuals)
        copy_to_duplicates(shards, optimizer)
        optimizer.set_step_count(newest_manifest.state.step - newest_manifest.state.skipped)
        self._newest = newest_manifest.state.step
        return newest_manifest.state

    def remove_newer(self, step: int, at_least: int) -> int | None:
        """Remove the checkpoints of a run that goes back from `step`: all after the one to continue from, which is the
        newest that is `at_least` so many steps older, or otherwise the oldest.

        Returns:
            The step of that checkpoint. None if there is none, and nothing was removed.

        Raises:
            CheckpointError: a save in progress failed.
        """
        self.report(wait=True)
        target = checkpoint_to_go_back_to(on_all_ranks(self._directory.steps, self._mesh)[0], step, at_least)
        if target is not None:
            on_first_rank(partial(self._directory.remove_newer, target), self._mesh)
        return target

    def due(self, step: int) -> bool:
        """Return whether the interval requires a checkpoint after `step`."""
        return step % self._spec.interval == 0

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
        replace: bool = False,
    ) -> None:
        """Save `state`, whose digest is this rank's part. Returns at once; with `wait`, when it is durable. A state of
        the step that was saved or loaded last is saved again only with `replace`.

        Raises:
            CheckpointError: this save, or an earlier one, failed.
        """
        self.report(wait=True)
        if replace or state.step != self._newest:
            self._newest = state.step
            full_state = state.model_copy(update={"digest": self._sum_digest(state.digest)})
            manifest = self._template.model_copy(update={"state": full_state})
            if outer is None:
                tensors = checkpoint_tensors(shards, optimizer, buffers)
            else:
                tensors = local_sgd_tensors(shards, outer, self._mesh.island)
            residuals = compression_state.tensors() if compression_state is not None else {}
            self._saver.begin({**tensors, **residuals}, manifest)
        if wait:
            self.report(wait=True)

    def report(self, *, wait: bool = False) -> None:
        """Report a save that has become durable; with `wait`, wait for the one in progress.

        Raises:
            CheckpointError: it failed.
        """
        saved = self._saver.take_finished(wait=wait)
        if saved is not None and self._mesh.rank == 0:
            self._events.checkpoint(saved.step, str(saved.path), saved.seconds)

    def _sum_digest(self, digest: int) -> int:
        # int64 sums wrap modulo 2^64, which 2^63 divides.
        total = torch.tensor([digest], dtype=torch.int64)
        dist.all_reduce(total, group=self._mesh.checkpoint_group)
        return int(total.item()) % MODULUS


def checkpoint_to_go_back_to(steps: Iterable[int], step: int, at_least: int) -> int | None:
    """The step of the newest checkpoint that is `at_least` so many steps before `step`, otherwise of the oldest one;
    None if there is none.
    """
    earlier = [found for found in steps if found < step]
    return max((found for found in earlier if found <= step - at_least), default=min(earlier, default=None))


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
        lora=training.lora,
        initial_weights=training.initial_weights if training.lora else None,
    )
