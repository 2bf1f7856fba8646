"""Loading the newest checkpoint that is whole, in whatever layout this mesh has.

Rank 0 names a candidate, every rank checks its share of the files against the manifest, and all take it or leave it
together. A damaged one is set aside and the one before is tried.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from meshwright_worker.checkpoint.directory import CheckpointDirectory, is_intact
from meshwright_worker.checkpoint.manifest import Kind, Manifest, Written, read_written
from meshwright_worker.checkpoint.storage import CheckpointReader
from meshwright_worker.mesh import Mesh

log = logging.getLogger(__name__)

_NONE = -1


class CheckpointMismatchError(ValueError):
    """A checkpoint belongs to another run. The message names what differs and the fix."""


def newest_intact(directory: CheckpointDirectory, mesh: Mesh, kind: type[Kind]) -> Kind | None:
    """The newest complete checkpoint whose files are what was written; None when there is none. Collective.

    Raises:
        ForeignCheckpointError: it is of another kind.
    """
    if mesh.rank == 0:
        directory.clean()
    while True:
        step = _from_first_rank((directory.steps() or [_NONE])[0] if mesh.rank == 0 else _NONE, mesh)
        if step == _NONE:
            return None
        manifest = read_written(directory.path(step), kind)
        if _everywhere(manifest is not None and _share_is_intact(directory.path(step), manifest, mesh), mesh):
            return manifest
        if mesh.rank == 0:
            log.warning("the checkpoint of step %d is damaged; trying the one before it", step)
            directory.set_aside(step)
        dist.barrier(group=mesh.checkpoint_group)


def check_same_run(found: Manifest, expected: Manifest) -> None:
    """Refuse to continue from the checkpoint of another model or another text.

    Raises:
        CheckpointMismatchError: it is of another run.
    """
    old, new = found.architecture.model_dump(exclude={"name"}), expected.architecture.model_dump(exclude={"name"})
    differing = [f"`{field}` {old[field]} there, {new[field]} here" for field in old if old[field] != new[field]]
    fix = "use an empty `checkpoint.claimName`, or the old settings"
    if differing:
        raise CheckpointMismatchError(f"the checkpoint holds another model ({'; '.join(differing)}): {fix}")
    if (found.lora, found.initial_weights) != (expected.lora, expected.initial_weights):
        raise CheckpointMismatchError(
            "the checkpoint has other adapters, or adapters of another model: `training.lora` or "
            f"`training.initialWeights` differ: {fix}"
        )
    if found.stream != expected.stream:
        raise CheckpointMismatchError(
            "the checkpoint was trained on another stream of samples, so its position means nothing here: `data`, "
            f"`training.sequenceLength` or `training.seed` differ: {fix}"
        )


def load_tensors(tensors: dict[str, torch.Tensor], path: Path, group: dist.ProcessGroup | None) -> None:
    """Fill tensors in place from a complete checkpoint. Collective over `group`; without one, this process alone.

    Raises:
        CheckpointMismatchError: a tensor is missing there or has another shape.
    """
    try:
        with warnings.catch_warnings():
            # A process alone is told that it is alone.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            load(
                tensors,
                storage_reader=CheckpointReader(path),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:
        raise CheckpointMismatchError(f"{path} cannot be loaded: {error}") from error


def names_in(path: Path) -> frozenset[str]:
    """The names of all tensors of a complete checkpoint."""
    return frozenset(CheckpointReader(path).read_metadata().state_dict_metadata)


def blanks_in(path: Path, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """Memory for those tensors of a complete checkpoint whose names are wanted; `load_tensors` fills it."""
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in CheckpointReader(path).read_metadata().state_dict_metadata.items()
        if wanted(name) and isinstance(entry, TensorStorageMetadata)
    }


def _share_is_intact(path: Path, manifest: Written, mesh: Mesh) -> bool:
    share = sorted(manifest.files)[mesh.rank :: mesh.layout.world_size]
    return all(is_intact(path / name, manifest.files[name]) for name in share)


def _from_first_rank(step: int, mesh: Mesh) -> int:
    shared = torch.tensor([step])
    dist.broadcast(shared, src=0, group=mesh.checkpoint_group)
    return int(shared.item())


def _everywhere(here: bool, mesh: Mesh) -> bool:
    agreed = torch.tensor([int(here)])
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=mesh.checkpoint_group)
    return bool(agreed.item())
