"""What ranks of the tests of changed layouts run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from meshwright_worker.checkpoint.loader import load_tensors
from meshwright_worker.checkpoint.manager import CheckpointManager, manifest_template
from meshwright_worker.checkpoint.manifest import TrainingState
from meshwright_worker.checkpoint.state_dict import checkpoint_tensors
from meshwright_worker.distributed.mesh import Mesh
from meshwright_worker.rank.task import RankTask
from tests.distributed.cases import Recorder, Training, whole
from tests.distributed.mesh_cache import kept_mesh, uses_kept_mesh

STEPS = 3
"""Steps before the save."""


@dataclass(frozen=True)
class Resumed:
    """A rank's state after it was saved or loaded, and the loss of the next step."""

    tensors: dict[str, torch.Tensor]
    """Parameters, moments and buffers that the rank has a part of, whole."""
    loss: float


@uses_kept_mesh
def train_and_save(task: RankTask) -> Resumed:
    """Train, save, and train one step more."""
    with kept_mesh(task) as mesh:
        training = Training(task.run, mesh)
        for number in range(1, STEPS + 1):
            training.step(number)
        trainer = training.trainer
        state = TrainingState(step=STEPS, samples=STEPS * task.run.training.global_batch_size)
        manager = _manager(task, mesh)
        manager.save(trainer.shards, trainer.optimizer, state, trainer.buffers, wait=True)
        return _next(training)


@uses_kept_mesh
def load_and_train(task: RankTask) -> Resumed:
    """Load what another layout has saved, and train one step."""
    with kept_mesh(task) as mesh:
        training = Training(task.run, mesh)
        trainer = training.trainer
        state = _manager(task, mesh).load(trainer.shards, trainer.optimizer, trainer.buffers)
        assert (state.step, state.samples) == (STEPS, STEPS * task.run.training.global_batch_size)
        trainer.on_parameters_loaded(state.step)
        trainer.restore_state(state)
        return _next(training)


def _manager(task: RankTask, mesh: Mesh) -> CheckpointManager:
    assert task.run.checkpoint is not None
    return CheckpointManager(task, task.run.checkpoint, mesh, Recorder(), manifest_template(task.run, "random", mesh))


def _next(training: Training) -> Resumed:
    trainer = training.trainer
    tensors = checkpoint_tensors(trainer.shards, trainer.optimizer, trainer.buffers)
    before = {name: whole(tensor) for name, tensor in tensors.items()}
    training.step(STEPS + 1)
    return Resumed(before, training.told().results[-1].loss)


@uses_kept_mesh
def load_recorded(
    task: RankTask, path: str, shapes: dict[str, tuple[torch.dtype, torch.Size]], placement: Placement
) -> dict[str, torch.Tensor]:
    """The whole tensors of a checkpoint that was loaded as shards of this placement where their shape allows it."""
    with kept_mesh(task) as mesh:
        tensors: dict[str, torch.Tensor] = {}
        for name, (dtype, shape) in shapes.items():
            empty = torch.zeros(shape, dtype=dtype)
            fits = not placement.is_shard() or placement.dim < len(shape)  # type: ignore[attr-defined]
            tensors[name] = distribute_tensor(empty, mesh.replicas, [placement]) if fits else empty
        load_tensors(tensors, Path(path), mesh.checkpoint_group)
        assert any(isinstance(tensor, DTensor) for tensor in tensors.values())
        return {name: whole(tensor) for name, tensor in tensors.items()}
