"""The values that a trainer starts with: those of a checkpoint, of published weights, or drawn ones.

Drawing and reading take long for large models. So each parameter gets its values once: a resumed run draws nothing that
its checkpoint contains.
"""

from __future__ import annotations

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
from meshwright_worker.pretrained.base_fingerprint import base_fingerprint
from meshwright_worker.pretrained.load import load_pretrained
from meshwright_worker.rank.failures import PretrainedError
from meshwright_worker.rank.task import Progress, no_report
from meshwright_worker.trainer.async_pipeline_trainer import AsyncPipelineTrainer
from meshwright_worker.trainer.trainer import Trainer


def load_state(
    trainer: Trainer | AsyncPipelineTrainer,
    run: NativeRun,
    mesh: Mesh,
    checkpoint_manager: CheckpointManager | None,
    progress: Progress = no_report,
) -> TrainingState:
    """Fill every parameter of a trainer that was built without values, and return the state to start from. Collective.
    `progress` is called after each part.

    Raises:
        PretrainedError: `training.initialWeights` contains another model, is damaged, or differs between ranks.
        CheckpointMismatchError, CheckpointVolumeError, ForeignCheckpointError, ResumeSourceError: as
            `CheckpointManager.load`.
    """
    state, weights = TrainingState(), run.training.initial_weights
    if checkpoint_manager is not None:
        if run.training.lora is not None and weights is not None:
            # One rank reads them: that all see the same files is checked where all read their parts.
            base = on_first_rank(partial(base_fingerprint, run.architecture, Path(weights)), mesh)
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
    draw_shards([shard for shard in missing if is_adapter(shard.name)], run, progress=progress)
    published = [shard for shard in missing if not is_adapter(shard.name)]
    if published or not resumed:
        directory, buffers = Path(weights), {} if resumed else trainer.buffers
        fingerprint = load_pretrained(published, run.architecture, directory, buffers, progress, begins=not resumed)
        if not is_same_on_all_ranks(fingerprint, mesh):
            raise PretrainedError(
                "the ranks see different files in `training.initialWeights`: every pod needs the same"
            )
    return state


def draw_shards(
    shards: Sequence[ParameterShard], run: NativeRun, *, tiled: bool = True, progress: Progress = no_report
) -> None:
    """Give shards the initial values of their parts; for `tiled` see `draw_into`."""
    for shard in shards:
        draw_into(shard.local, shard.name, shard.shape, shard.box, run.architecture, run.training.seed, tiled=tiled)
        progress()
