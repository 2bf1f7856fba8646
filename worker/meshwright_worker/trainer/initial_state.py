"""The values that a trainer starts with: those of a checkpoint, of published weights, or drawn ones.

Drawing and reading take long for large models. So each parameter gets its values once: a resumed run draws nothing that
its checkpoint contains.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from meshwright.protocol.run_config import NativeRun
from meshwright_worker.checkpoint.collective_errors import on_first_rank
from meshwright_worker.checkpoint.manager import CheckpointManager
from meshwright_worker.checkpoint.manifest import TrainingState
from meshwright_worker.distributed.mesh import Mesh, is_same_on_all_ranks
from meshwright_worker.models.init_weights import draw_into
from meshwright_worker.models.lora import is_adapter
from meshwright_worker.parallel.shards import ParameterShard
from meshwright_worker.pretrained.adapter_import import check_adapter_base, open_adapter
from meshwright_worker.pretrained.base_fingerprint import base_fingerprint
from meshwright_worker.pretrained.load import load_pretrained, type_of_weights
from meshwright_worker.rank.failures import PretrainedError
from meshwright_worker.rank.task import WorkProgress
from meshwright_worker.trainer.async_pipeline_trainer import AsyncPipelineTrainer
from meshwright_worker.trainer.trainer import Trainer

log = logging.getLogger(__name__)


def load_state(
    trainer: Trainer | AsyncPipelineTrainer,
    run: NativeRun,
    mesh: Mesh,
    checkpoint_manager: CheckpointManager | None,
    progress: WorkProgress | None = None,
) -> TrainingState:
    """Fill every parameter of a trainer that was built without values, and return the state to start from. Collective.
    `progress` counts the bytes that are read or drawn.

    Raises:
        PretrainedError: `training.initialWeights` contains another model, or `training.lora.initialAdapter` another
            adapter; or they are damaged, or differ between ranks.
        CheckpointMismatchError, CheckpointVolumeError, ForeignCheckpointError, ResumeSourceError: as
            `CheckpointManager.load`.
    """
    progress = progress or WorkProgress()
    state, weights, lora = TrainingState(), run.training.initial_weights, run.training.lora
    base: str | None = None
    if lora is not None and weights is not None:
        # One rank reads them: that all see the same files is checked where all read their parts.
        base = on_first_rank(partial(base_fingerprint, run.architecture, Path(weights)), mesh)
    if checkpoint_manager is not None:
        checkpoint_manager.adapters_belong_to(base)
        state = checkpoint_manager.load(
            trainer.shards,
            trainer.optimizer,
            trainer.buffers,
            trainer.outer,
            trainer.compression_state,
            progress=progress,
        )
    resumed = state.step > 0
    # Checkpoints do not contain frozen parameters.
    missing = [*trainer.frozen] if resumed else [*trainer.shards, *trainer.frozen]
    if weights is None:
        tiled = not resumed or checkpoint_manager is None or checkpoint_manager.draws_tiles
        draw_shards(missing, run, tiled=tiled, progress=progress)
        return state
    adapters = [shard for shard in missing if is_adapter(shard.name)]
    if not resumed and lora is not None and lora.initial_adapter is not None:
        published_as = type_of_weights(Path(weights))
        adapter = open_adapter(run.architecture, published_as, lora, Path(lora.initial_adapter))
        check_adapter_base(Path(lora.initial_adapter), weights, base)
        _check_same_files(adapter.fingerprint, "training.lora.initialAdapter", mesh)
        adapter.load(adapters, progress.begin("adapter", _size(adapters)))
        if mesh.rank == 0:
            log.info("training begins from the adapter in %s", lora.initial_adapter)
    else:
        draw_shards(adapters, run, progress=progress)
    published = [shard for shard in missing if not is_adapter(shard.name)]
    if published or not resumed:
        directory, buffers = Path(weights), {} if resumed else trainer.buffers
        fingerprint = load_pretrained(published, run.architecture, directory, buffers, progress, begins=not resumed)
        _check_same_files(fingerprint, "training.initialWeights", mesh)
    return state


def _check_same_files(fingerprint: str, field: str, mesh: Mesh) -> None:
    """Reject files that differ between ranks. Collective.

    Raises:
        PretrainedError: see above.
    """
    if not is_same_on_all_ranks(fingerprint, mesh):
        raise PretrainedError(f"the ranks see different files in `{field}`: every pod needs the same")


def draw_shards(
    shards: Sequence[ParameterShard], run: NativeRun, *, tiled: bool = True, progress: WorkProgress | None = None
) -> None:
    """Give shards the initial values of their parts; for `tiled` see `draw_into`."""
    counted = (progress or WorkProgress()).begin("draw", _size(shards))
    for shard in shards:
        draw_into(shard.local, shard.name, shard.shape, shard.box, run.architecture, run.training.seed, tiled=tiled)
        counted(shard.local.nbytes)


def _size(shards: Sequence[ParameterShard]) -> int:
    """Bytes of this rank's parts."""
    return sum(shard.local.nbytes for shard in shards)
