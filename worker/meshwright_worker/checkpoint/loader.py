"""Loads the newest intact checkpoint, in any layout of this mesh.

Rank 0 names a candidate, every rank verifies its share of the files against the manifest, and all ranks accept or
reject it together. A damaged checkpoint is set aside and the previous one is tried. If a rank cannot read the volume,
has mounted another one, or alone reads other bytes than were written, no checkpoint counts as damaged: the start fails
on every rank, and all files stay in place.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load

from meshwright.models.differences import differing_fields
from meshwright_worker.checkpoint.collective_errors import on_all_ranks, on_first_rank
from meshwright_worker.checkpoint.dcp_storage import CheckpointReader
from meshwright_worker.checkpoint.files import CheckpointPath, files_of, open_index
from meshwright_worker.checkpoint.full_tensors import candidate_checkpoints, first_intact
from meshwright_worker.checkpoint.manifest import (
    MANIFEST,
    BaseManifest,
    Manifest,
    ManifestType,
    check_file,
    check_files,
    has_other_base,
    read_manifest_as,
)
from meshwright_worker.checkpoint.state_dict import OPTIMIZER
from meshwright_worker.checkpoint.store import CheckpointStore
from meshwright_worker.checkpoint_errors import CheckpointMismatchError, CheckpointVolumeError, DamagedCheckpointError
from meshwright_worker.distributed.mesh import Mesh
from meshwright_worker.rank.task import WorkProgress

log = logging.getLogger(__name__)

_UNSEEN = "unseen"
_SHARED_VOLUME_HINT = "do all pods mount the same volume there, with every file visible to all?"
_MAX_NAMED = 8
"""Maximum number of ranks in a message."""


def newest_intact(store: CheckpointStore, mesh: Mesh, manifest_type: type[ManifestType]) -> ManifestType | None:
    """Return the latest complete checkpoint with intact files; None if there is none. Collective.

    Raises:
        CheckpointMismatchError: the directory of the newest has the name of another step.
        CheckpointVolumeError: a rank cannot read the checkpoints, or does not see them; none is set aside in this case.
        ForeignCheckpointError: the newest is of another kind or version.
    """
    newest = newest_of_all([store], mesh, manifest_type)
    return newest[1] if newest is not None else None


def newest_of_all(
    stores: Sequence[CheckpointStore],
    mesh: Mesh,
    manifest_type: type[ManifestType],
    progress: WorkProgress | None = None,
    otherwise: str = "starting at step 0",
) -> tuple[CheckpointStore, ManifestType] | None:
    """Return the latest complete checkpoint with intact files over all stores; of the same step, that of the first one.
    `otherwise` says in the log what happens if there is none.

    Raises:
        CheckpointMismatchError: its directory has the name of another step.
        CheckpointVolumeError, ForeignCheckpointError: as `newest_intact`.
    """
    found = []
    for number, store in enumerate(stores):
        on_first_rank(store.clean, mesh)
        found += [(step, number) for step in steps_on_mesh(store, mesh)]
    for step, number in sorted(found, key=lambda entry: (-entry[0], entry[1])):
        store = stores[number]
        checkpoint = store.files(step)
        try:
            manifest = read_intact(checkpoint, mesh, manifest_type, progress)
        except DamagedCheckpointError as error:
            if mesh.rank == 0:
                log.warning("%s; trying the previous checkpoint", error)
        else:
            check_step(checkpoint, step, manifest)
            return store, manifest
        on_first_rank(partial(store.quarantine, step), mesh)
    if mesh.rank == 0:
        places = ", ".join(map(str, stores))
        if found:
            log.warning(
                "every checkpoint in %s is damaged (steps %s): %s; the damaged ones are retained until the first "
                "checkpoint is saved",
                places,
                ", ".join(str(step) for step in sorted({step for step, _ in found}, reverse=True)),
                otherwise,
            )
        else:
            log.info("no complete checkpoint in %s: %s", places, otherwise)
    return None


def steps_on_mesh(store: CheckpointStore, mesh: Mesh) -> list[int]:
    """Return the steps of complete checkpoints of a store, the same on every rank, newest first. Collective.

    Raises:
        CheckpointVolumeError: a rank cannot list them, or sees some where rank 0 sees none.
    """
    if store.is_remote:
        return on_first_rank(store.steps, mesh) or []
    listed = on_all_ranks(store.steps, mesh)
    ranks_with_checkpoints = [rank for rank, steps in enumerate(listed) if steps and not listed[0]]
    if ranks_with_checkpoints:
        seen = f"{_ranks(ranks_with_checkpoints)} but not by rank 0"
        raise CheckpointVolumeError(f"the checkpoints in {store} are seen by {seen}: {_SHARED_VOLUME_HINT}")
    return listed[0]


def find_checkpoint_on_mesh(path: Path | str, mesh: Mesh, *, best: bool = False) -> tuple[CheckpointPath, Manifest]:
    """Do the same as `find_checkpoint`, but each rank reads only its share of the files; all return the same.
    Collective.

    Raises:
        DamagedCheckpointError: it is damaged, or all are. The message names the file.
        CheckpointVolumeError, ForeignCheckpointError: as `read_intact`.
    """
    listed = on_all_ranks(partial(candidate_checkpoints, path, best=best), mesh)[0]
    return first_intact(listed, lambda checkpoint: read_intact(checkpoint, mesh, Manifest))


def read_intact(
    checkpoint: CheckpointPath, mesh: Mesh, manifest_type: type[ManifestType], progress: WorkProgress | None = None
) -> ManifestType:
    """Return the manifest of a checkpoint after verifying its files. Collective: each rank reads its share of them.
    What one rank finds damaged, another one reads again: the memory of a node may be broken, and not the file.

    Raises:
        DamagedCheckpointError: a file is damaged. The message names it.
        CheckpointVolumeError: a rank cannot read it, does not see it, or reads it as no other rank does.
        ForeignCheckpointError: it is of another kind or version.
    """
    manifest: ManifestType | None = None

    def fault() -> tuple[str, str]:
        nonlocal manifest
        try:
            manifest = read_manifest_as(checkpoint, manifest_type)
            check_files(checkpoint, manifest, mesh.rank, mesh.layout.world_size, progress)
        except FileNotFoundError:
            return _UNSEEN, ""
        except DamagedCheckpointError as error:
            return str(error), error.file
        return "", ""

    faults = on_all_ranks(fault, mesh)
    ranks_without_checkpoint = [rank for rank, (text, _) in enumerate(faults) if text == _UNSEEN]
    if ranks_without_checkpoint:
        raise CheckpointVolumeError(
            f"{checkpoint} is seen by rank 0 but not by {_ranks(ranks_without_checkpoint)}: {_SHARED_VOLUME_HINT}"
        )
    damages = {rank: fault for rank, fault in enumerate(faults) if fault[0]}
    if damages or manifest is None:
        raise _confirmed(checkpoint, manifest, damages, mesh, progress)
    return manifest


def _confirmed(
    checkpoint: CheckpointPath,
    manifest: BaseManifest | None,
    damages: Mapping[int, tuple[str, str]],
    mesh: Mesh,
    progress: WorkProgress | None,
) -> DamagedCheckpointError | CheckpointVolumeError:
    """Have what each of these ranks finds damaged read by another rank, far from it. Collective.

    Returns:
        The damage, if another rank finds it too. Otherwise the error of the rank that is alone with it.
    """
    world = mesh.layout.world_size
    reader_of = {rank: (rank + max(1, world // 2)) % world for rank in damages}

    def intact() -> list[int]:
        """The ranks whose finding this one cannot confirm."""
        found = []
        for rank, (_, name) in damages.items():
            if reader_of[rank] == mesh.rank != rank and _is_intact(checkpoint, manifest, name, progress):
                found.append(rank)
        return found

    alone = {rank for ranks in on_all_ranks(intact, mesh) for rank in ranks}
    for rank, (text, name) in damages.items():
        if rank not in alone:
            return DamagedCheckpointError(text, name)
    rank, (text, _) = next(iter(damages.items()))
    fix = "check memory, disk and mounts of the node of that rank, or cordon it"
    return CheckpointVolumeError(f"only rank {rank} finds that {text}; for rank {reader_of[rank]} it is intact: {fix}")


def _is_intact(
    checkpoint: CheckpointPath, manifest: BaseManifest | None, name: str, progress: WorkProgress | None
) -> bool:
    """Whether this rank finds a file intact; without a name, the manifest."""
    if manifest is None or not name:
        return manifest is not None
    record = manifest.files[name]
    try:
        check_file(files_of(checkpoint), name, record, (progress or WorkProgress()).begin("verify", record.size))
    except DamagedCheckpointError:
        return False
    return True


def check_step(checkpoint: CheckpointPath, step: int, manifest: BaseManifest) -> None:
    """Reject a checkpoint that has got the name of another step: the names say which one is the newest, and which
    steps a run may save.

    Raises:
        CheckpointMismatchError: it has.
    """
    actual = manifest.state.step
    if actual != step:
        name = str(checkpoint).rpartition("/")[2].replace(f"{step:08d}", f"{actual:08d}")
        raise CheckpointMismatchError(
            f"{checkpoint} contains the checkpoint of step {actual}, as its {MANIFEST} says: was it renamed? "
            f"Rename it to {name}, or move it away"
        )


def check_same_run(actual: Manifest, expected: Manifest, *, of_other_run: bool = False) -> None:
    """Reject a checkpoint of another model or another corpus; `of_other_run`: one that `checkpoint.resumeFrom` names.

    Raises:
        CheckpointMismatchError: it belongs to another run.
    """
    instead, settings = "use an empty `checkpoint.claimName`", "the old settings"
    if of_other_run:
        instead, settings = "name another run in `checkpoint.resumeFrom`", "use the settings of that run"
    fix = f"{instead}, or {settings}"
    old, new = actual.architecture.model_dump(exclude={"name"}), expected.architecture.model_dump(exclude={"name"})
    if differing := differing_fields(old, new):
        raise CheckpointMismatchError(f"the checkpoint contains another model ({'; '.join(differing)}): {fix}")
    if (actual.lora, actual.initial_weights) != (expected.lora, expected.initial_weights):
        raise CheckpointMismatchError(
            "the checkpoint has other adapters, or adapters of another model: `training.lora` or "
            f"`training.initialWeights` differ: {fix}"
        )
    if has_other_base(actual.base_fingerprint, expected.base_fingerprint):
        raise CheckpointMismatchError(
            f"the checkpoint's adapters were trained on other weights (fingerprint {actual.base_fingerprint}) than "
            f"those in `training.initialWeights: {expected.initial_weights}` now ({expected.base_fingerprint}): "
            f"restore the original files there, or {instead}"
        )
    if actual.stream != expected.stream:
        raise CheckpointMismatchError(
            "the checkpoint was trained on another stream of samples, so its position is not valid in this one: "
            "`data`, `training.sequenceLength` or `training.seed` differ, or a file of `data` was added, removed or "
            f"changed: {fix}. To continue with other data, begin a job with `training.initialWeights`"
        )


def load_tensors(
    tensors: dict[str, torch.Tensor],
    path: CheckpointPath,
    group: dist.ProcessGroup | None,
    progress: WorkProgress | None = None,
) -> None:
    """Fill tensors in place from a complete checkpoint. Collective over `group`; without one, in this process only.

    Raises:
        CheckpointMismatchError: a tensor is missing in the checkpoint or has another shape.
        CheckpointVolumeError: a rank cannot read a file.
    """
    try:
        with warnings.catch_warnings():
            # Tell torch explicitly that there is only one process.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            load(
                tensors,
                storage_reader=CheckpointReader(path, tensors, progress),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:
        # A rank that cannot read a file may read it at the next start. Any other failure would repeat.
        if any(isinstance(failure, OSError) for failure, _ in error.failures.values()):
            raise CheckpointVolumeError(f"{path} cannot be read: {error}") from error
        problem = _missing_moment(path, tensors) or f"{path} cannot be loaded: {error}"
        raise CheckpointMismatchError(problem) from error


def _missing_moment(path: CheckpointPath, tensors: Mapping[str, torch.Tensor]) -> str:
    """What to do if moments are missing in a checkpoint that has everything else. Empty if that is not so."""
    missing = tensors.keys() - tensor_names(path)
    if not missing or not all(name.startswith(f"{OPTIMIZER}.") for name in missing):
        return ""
    return (
        f"{path} has no `{min(missing)}`: it was saved with another `training.optimizer.name`. Change that back, or "
        "export the model and begin a job with `training.initialWeights`"
    )


def tensor_names(path: CheckpointPath) -> frozenset[str]:
    """Return the names of all tensors of a complete checkpoint."""
    return frozenset(open_index(files_of(path)).names)


def allocate_tensors(path: CheckpointPath, include: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """Allocate the tensors of a complete checkpoint with the given names; `load_tensors` fills them."""
    index = open_index(files_of(path))
    return {name: torch.empty(index.shape(name), dtype=index.dtype(name)) for name in index.names if include(name)}


def _ranks(ranks: Sequence[int]) -> str:
    more = f" (and {len(ranks) - _MAX_NAMED} more)" if len(ranks) > _MAX_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_MAX_NAMED]))}{more}"
