"""Checkpoints of a custom module: every parameter once, under its first name, in any layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from meshwright.api.checkpoint import Retention
from meshwright_worker.checkpoint.async_save import AsyncCheckpointer
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.files import CheckpointPath, files_of, open_index
from meshwright_worker.checkpoint.loader import load_tensors, newest_of_all
from meshwright_worker.checkpoint.manifest import LayoutRecord, ModuleManifest, TrainingState
from meshwright_worker.checkpoint.state_dict import checkpoint_tensors, model_tensors
from meshwright_worker.checkpoint.store import Tier
from meshwright_worker.checkpoint_errors import CheckpointMismatchError
from meshwright_worker.command.report_file import ReportFile
from meshwright_worker.custom_module.parallelize import ParallelModule
from meshwright_worker.distributed.mesh import Mesh
from meshwright_worker.rank.task import WorkProgress


def save(parallel_module: ParallelModule, mesh: Mesh, root: Path, step: int, keep: int) -> Path:
    """See `CustomModuleTrainer.save`."""
    directory = CheckpointDirectory(root)
    layout = LayoutRecord(
        tensor=mesh.layout.tensor, pipeline=1, data=mesh.layout.data, zero_stage=parallel_module.zero_stage
    )
    manifest = ModuleManifest(
        state=TrainingState(step=step), module=type(parallel_module.module).__name__, layout=layout
    )
    saver = AsyncCheckpointer([Tier(directory, Retention(keep))], mesh)
    saver.begin(_tensors(parallel_module), manifest)
    saver.take_finished(wait=True)
    return directory.path(step)


def load(parallel_module: ParallelModule, mesh: Mesh, root: Path) -> int:
    """See `CustomModuleTrainer.load`."""
    directory, progress = CheckpointDirectory(root), WorkProgress(ReportFile())
    newest = newest_of_all([directory], mesh, ModuleManifest, progress)
    if newest is None:
        return 0
    newest_manifest = newest[1]
    path, tensors = directory.path(newest_manifest.state.step), _tensors(parallel_module)
    _check_same_module(path, tensors)
    load_tensors(tensors, path, mesh.checkpoint_group, progress)
    parallel_module.data_parallel.sync_parameters()
    parallel_module.optimizer.set_step_count(newest_manifest.state.step)
    return newest_manifest.state.step


def _check_same_module(path: CheckpointPath, tensors: Mapping[str, torch.Tensor]) -> None:
    index = open_index(files_of(path))
    stored = set(index.names)
    unexpected, missing = sorted(stored - tensors.keys()), sorted(tensors.keys() - stored)
    differing = [name for name in tensors if name in stored and index.shape(name) != tensors[name].shape]
    if unexpected:
        problem = f"it has `{'`, `'.join(unexpected[:3])}`, which this module does not have"
    elif missing:
        problem = f"it lacks `{'`, `'.join(missing[:3])}`, which this module has"
    elif differing:
        first = differing[0]
        problem = f"`{first}` is {list(index.shape(first))} in it, and {list(tensors[first].shape)} in this module"
    else:
        return
    raise CheckpointMismatchError(
        f"{path} belongs to another module: {problem}: load it with the module that it was saved from, with the same "
        "parameters tied and frozen"
    )


def _tensors(parallel_module: ParallelModule) -> dict[str, torch.Tensor]:
    persistent_names = parallel_module.module.state_dict().keys()
    buffers = {name: buffer for name, buffer in parallel_module.module.named_buffers() if name in persistent_names}
    return {
        **checkpoint_tensors(parallel_module.data_parallel.shards, parallel_module.optimizer, buffers),
        **model_tensors(parallel_module.frozen),
    }
