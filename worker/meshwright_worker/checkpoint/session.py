"""Checkpoints as the training loop sees them: where to begin, and what to save when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.api.spec import CheckpointSpec
from meshwright.api.training import TrainingSpec
from meshwright.models.architecture import Architecture
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.loader import blanks_in, check_same_run, load_tensors, names_in, newest_intact
from meshwright_worker.checkpoint.manifest import LayoutRecord, Manifest, TrainingState
from meshwright_worker.checkpoint.saver import Checkpointer
from meshwright_worker.checkpoint.tensors import checkpoint_tensors, spread_copies
from meshwright_worker.data.digest import MODULUS
from meshwright_worker.mesh import Mesh
from meshwright_worker.optimizer import Optimizer
from meshwright_worker.outer.outer import Outer
from meshwright_worker.outer.state import outer_tensors
from meshwright_worker.parallel.compression.memory import Memory
from meshwright_worker.parallel.shards import Shard
from meshwright_worker.task import RankEvents, RankTask


class CheckpointSession:
    """The checkpoints of one rank in one mesh generation. Every method is collective."""

    def __init__(
        self,
        task: RankTask,
        spec: CheckpointSpec,
        root: str,
        mesh: Mesh,
        events: RankEvents,
        blank: Manifest,
    ) -> None:
        self._spec = spec
        self._mesh = mesh
        self._events = events
        self._blank = blank
        self._directory = CheckpointDirectory(Path(root), task.generation)
        self._saver = Checkpointer(self._directory, spec.retained, mesh)
        self._newest = -1

    def load(
        self,
        shards: Sequence[Shard],
        optimizer: Optimizer,
        buffers: Mapping[str, torch.Tensor] | None = None,
        outer: Outer | None = None,
        memory: Memory | None = None,
    ) -> TrainingState:
        """Fill model and optimizer from the newest whole checkpoint; the state to go on from, step 0 without one.

        `memory` recalls what compressed gradients had left out, if the checkpoint has it for this layout.

        Raises:
            CheckpointMismatchError: it is of another run.
            CheckpointVolumeError, ForeignCheckpointError: as `newest_intact`.
        """
        found = newest_intact(self._directory, self._mesh, Manifest)
        if found is None:
            return TrainingState()
        check_same_run(found, self._blank)
        path = self._directory.path(found.state.step)
        if outer is None:
            tensors = checkpoint_tensors(shards, optimizer, buffers)
        else:
            tensors = outer_tensors(shards, outer, self._mesh.island, names_in(path))
        left_out = blanks_in(path, memory.holds) if memory is not None else {}
        load_tensors({**tensors, **left_out}, path, self._mesh.checkpoint_group)
        if memory is not None:
            memory.recall(left_out)
        spread_copies(shards, optimizer)
        optimizer.set_steps(found.state.step - found.state.skipped)
        self._newest = found.state.step
        return found.state

    def due(self, step: int) -> bool:
        """Whether the interval asks for a checkpoint after `step`."""
        return step % self._spec.interval == 0

    def save(
        self,
        shards: Sequence[Shard],
        optimizer: Optimizer,
        state: TrainingState,
        buffers: Mapping[str, torch.Tensor] | None = None,
        outer: Outer | None = None,
        memory: Memory | None = None,
        *,
        wait: bool,
    ) -> None:
        """Save `state`, whose digest is this rank's own part; returns at once, or with `wait` when it is durable.

        Raises:
            CheckpointError: this save, or an earlier one, failed.
        """
        self.report(wait=True)
        if state.step != self._newest:
            self._newest = state.step
            whole = state.model_copy(update={"digest": self._summed(state.digest)})
            manifest = self._blank.model_copy(update={"state": whole})
            if outer is None:
                tensors = checkpoint_tensors(shards, optimizer, buffers)
            else:
                tensors = outer_tensors(shards, outer, self._mesh.island)
            left_out = memory.tensors() if memory is not None else {}
            self._saver.begin({**tensors, **left_out}, manifest)
        if wait:
            self.report(wait=True)

    def report(self, *, wait: bool = False) -> None:
        """Tell of a save that became durable meanwhile; with `wait`, when the one under way is.

        Raises:
            CheckpointError: it failed.
        """
        saved = self._saver.finished(wait=wait)
        if saved is not None and self._mesh.rank == 0:
            self._events.checkpoint(saved.step, str(saved.path), saved.seconds)

    def _summed(self, digest: int) -> int:
        # int64 sums wrap modulo 2^64, which 2^63 divides.
        total = torch.tensor([digest], dtype=torch.int64)
        dist.all_reduce(total, group=self._mesh.checkpoint_group)
        return int(total.item()) % MODULUS


def blank_manifest(
    task: RankTask, architecture: Architecture, training: TrainingSpec, stream: str, mesh: Mesh
) -> Manifest:
    """What every manifest of this generation says alike."""
    layout = LayoutRecord(
        tensor=mesh.layout.tensor,
        pipeline=mesh.layout.pipeline,
        data=mesh.layout.data,
        context=mesh.layout.context,
        expert=mesh.layout.expert,
        zero_stage=task.run.parallelism.zero_stage,
    )
    return Manifest(
        state=TrainingState(),
        architecture=architecture,
        seed=training.seed,
        sequence_length=training.sequence_length,
        stream=stream,
        layout=layout,
        lora=training.lora,
        initial_weights=training.initial_weights if training.lora else None,
    )
