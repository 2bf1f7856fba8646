"""A stage in the layout of its mesh. The order of the steps stands here and nowhere else.

1. build on the meta device: no memory yet;
2. split over the tensor group: matrices become DTensors;
3. shard over replicas (ZeRO 2 and 3): shards of those shards;
4. take memory for what is left and fill it with initial weights;
5. without FSDP, let modules compute on the local parts themselves.

The other way round FSDP would gather what tensor parallelism is about to split; and a model that had its weights before
step 3 would have to fit into one rank.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from meshwright.models.architecture import Architecture
from meshwright.protocol import RunConfig
from meshwright_worker.mesh import DATA, TENSOR, Mesh
from meshwright_worker.models.initialize import initialize
from meshwright_worker.models.llama import DecoderStage
from meshwright_worker.parallel.tensor import compute_on_local, split_over_tensor_group
from meshwright_worker.parallel.zero import settle, shard_over_replicas
from meshwright_worker.precision import compute_dtype


def build_stage(run: RunConfig, model: Architecture, mesh: Mesh) -> tuple[DecoderStage, dict[str, DTensor]]:
    """This rank's shard of this rank's pipeline stage, with initial weights.

    Returns:
        The stage, and by name those of its parameters that are parts of a larger one, as DTensors.

    Raises:
        ValueError: `run` is not a run of this runtime.
    """
    if run.training is None:
        raise ValueError("`training` is required")
    with torch.device("meta"):
        stage = DecoderStage(
            model, compute_dtype(run.training.precision), mesh.coordinates.pipeline, mesh.layout.pipeline
        )
    if mesh.layout.tensor > 1:
        split_over_tensor_group(stage, mesh.devices[TENSOR], sequence=run.parallelism.sequence)
    if shards_over_replicas(run):
        shard_over_replicas(
            stage, mesh.devices[DATA], zero_stage=run.parallelism.zero_stage, precision=run.training.precision
        )
    initialize(stage, model, run.training.seed, mesh.device)
    if not shards_over_replicas(run):
        return stage, compute_on_local(stage)
    settle(stage)
    return stage, {name: value for name, value in stage.named_parameters() if isinstance(value, DTensor)}


def shards_over_replicas(run: RunConfig) -> bool:
    """Whether parameters are sharded over replicas; a single replica has nobody to share with."""
    return run.parallelism.zero_stage > 0 and run.data_parallel > 1
