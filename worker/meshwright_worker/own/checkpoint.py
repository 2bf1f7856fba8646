"""Checkpoints of a module of one's own: every parameter once, under its first name, whatever layout wrote it."""

from __future__ import annotations

from pathlib import Path

import torch

from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.loader import CheckpointMismatchError, load_tensors, names_in, newest_intact
from meshwright_worker.checkpoint.manifest import LayoutRecord, ModuleManifest, TrainingState
from meshwright_worker.checkpoint.saver import Checkpointer
from meshwright_worker.checkpoint.tensors import checkpoint_tensors, model_tensors
from meshwright_worker.mesh import Mesh
from meshwright_worker.own.build import Built


def save(built: Built, mesh: Mesh, root: Path, step: int, keep: int) -> Path:
    """See `OwnTrainer.save`."""
    directory = CheckpointDirectory(root)
    layout = LayoutRecord(tensor=mesh.layout.tensor, pipeline=1, data=mesh.layout.data, zero_stage=built.zero_stage)
    manifest = ModuleManifest(state=TrainingState(step=step), module=type(built.module).__name__, layout=layout)
    saver = Checkpointer(directory, keep, mesh)
    saver.begin(_tensors(built), manifest)
    saver.finished(wait=True)
    return directory.path(step)


def load(built: Built, mesh: Mesh, root: Path) -> int:
    """See `OwnTrainer.load`."""
    directory = CheckpointDirectory(root)
    found = newest_intact(directory, mesh, ModuleManifest)
    if found is None:
        return 0
    path, tensors = directory.path(found.state.step), _tensors(built)
    more = sorted(names_in(path) - tensors.keys())
    if more:
        raise CheckpointMismatchError(
            f"{path} is of another module: it has `{'`, `'.join(more[:3])}`, which this one has not. Load it with the "
            "module that it was saved from, with the same parameters tied and frozen"
        )
    load_tensors(tensors, path, mesh.checkpoint_group)
    built.replicas.publish()
    built.optimizer.set_steps(found.state.step)
    return found.state.step


def _tensors(built: Built) -> dict[str, torch.Tensor]:
    kept = built.module.state_dict().keys()
    buffers = {name: buffer for name, buffer in built.module.named_buffers() if name in kept}
    return {
        **checkpoint_tensors(built.replicas.shards, built.optimizer, buffers),
        **model_tensors(built.frozen),
    }
