"""The model in the layout of its mesh. The order of the steps stands here and nowhere else.

1. build on the meta device: no memory yet;
2. split over the tensor group: matrices become DTensors, and the loss is one of split logits;
3. shard over replicas (ZeRO 2 and 3): shards of those shards;
4. take memory for what is left and fill it with initial weights;
5. recompute and offload activations: a change of how layers are run, not of the layers;
6. without FSDP, let modules compute on the local parts themselves.

The other way round FSDP would gather what tensor parallelism is about to split; and a model that had its weights before
step 3 would have to fit into one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from meshwright.models.architecture import Architecture
from meshwright.protocol import RunConfig
from meshwright_worker.fp8.linear import use_fp8
from meshwright_worker.memory.apply import home_of_parameters, parameter_offload, save_memory
from meshwright_worker.memory.compiled import compile_layers
from meshwright_worker.mesh import TENSOR, Mesh
from meshwright_worker.models.dropout import Slice, drop_out
from meshwright_worker.models.initialize import initialize
from meshwright_worker.models.llama import DecoderStage
from meshwright_worker.parallel.linear_loss import chunk_loss
from meshwright_worker.parallel.tensor import compute_on_local, split_over_tensor_group
from meshwright_worker.parallel.zero import settle, shard_over_replicas
from meshwright_worker.precision import compute_dtype, stored_dtype


@dataclass(frozen=True)
class BuiltStage:
    """One stage as this rank holds it."""

    index: int
    """Which of the model's stages."""
    module: DecoderStage
    distributed: dict[str, DTensor]
    """By name, those of its parameters that are parts of a larger one."""


def build_stages(run: RunConfig, model: Architecture, mesh: Mesh) -> list[BuiltStage]:
    """This rank's shards of the stages that it holds, with initial weights.

    Raises:
        ValueError: `run` is not a run of this runtime.
    """
    return [_build(run, model, mesh, index, mesh.layout.pipeline) for index in [mesh.coordinates.pipeline]]


def _build(run: RunConfig, model: Architecture, mesh: Mesh, index: int, stages: int) -> BuiltStage:
    if run.training is None:
        raise ValueError("`training` is required")
    precision = run.training.precision
    with torch.device("meta"):
        stage = DecoderStage(model, compute_dtype(precision), index, stages).to(stored_dtype(run.training))
    if mesh.layout.tensor > 1:
        split_over_tensor_group(stage, mesh.devices[TENSOR], sequence=run.parallelism.sequence)
    if run.training.fp8 is not None:
        use_fp8(stage, run.training.fp8, mesh.group(TENSOR) if mesh.layout.tensor > 1 else None)
    if run.training.dropout or run.training.attention_dropout:
        part = Slice(mesh.coordinates.tensor, mesh.layout.tensor, run.parallelism.sequence and mesh.layout.tensor > 1)
        drop_out(stage, model.heads, run.training, part)
    if run.training.loss_chunk_tokens is not None:
        group = mesh.group(TENSOR) if mesh.layout.tensor > 1 else None
        chunk_loss(stage, run.training.loss_chunk_tokens, group, sequence=run.parallelism.sequence)
    if shards_over_replicas(run):
        zero = run.parallelism.zero_stage
        offload = parameter_offload(run.training, mesh.device)
        shard_over_replicas(stage, mesh.replicas, zero_stage=zero, precision=precision, offload=offload)
    initialize(stage, model, run.training.seed, home_of_parameters(run.training, mesh.device))
    save_memory(stage, run.training, mesh.device)
    if run.training.compile:
        compile_layers(stage)
    if not shards_over_replicas(run):
        return BuiltStage(index, stage, compute_on_local(stage))
    settle(stage)
    distributed: dict[str, DTensor] = {
        name: value for name, value in stage.named_parameters() if isinstance(value, DTensor)
    }
    return BuiltStage(index, stage, distributed)


def shards_over_replicas(run: RunConfig) -> bool:
    """Whether parameters are sharded over replicas; a single replica has nobody to share with."""
    return run.parallelism.zero_stage > 0 and run.layout.replicas > 1
