"""The model in the layout of its mesh. The order of the steps stands here and nowhere else.

1. build on the meta device, with adapters if any: no memory yet;
2. let attention go over the context group: it has no parameters;
3. spread experts over the expert group and split over the tensor group: matrices become DTensors; put in what knows
   which part of a layer a rank has (fp8 products, dropout, the loss in chunks);
4. shard over replicas (FSDP2), experts over their own: shards of those shards;
5. take memory for what is left and fill it with initial weights;
6. recompute and offload activations, compile: a change of how layers are run, not of the layers;
7. without FSDP, let modules compute on the local parts themselves.

The other way round FSDP would gather what tensor parallelism is about to split; and a model that had its weights before
step 4 would have to fit into one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from meshwright.api.data import Packing
from meshwright.api.training import TrainingSpec
from meshwright.models.architecture import Architecture
from meshwright.protocol import RunConfig
from meshwright.runs.context_slices import Deal
from meshwright.runs.engine import Engine, engine_of
from meshwright.schedules.division import Division, divide
from meshwright_worker.fp8.grouped import use_fp8_in_experts
from meshwright_worker.fp8.linear import use_fp8
from meshwright_worker.memory.apply import home_of_parameters, parameter_offload, save_memory
from meshwright_worker.mesh import CONTEXT, EXPERT, TENSOR, Mesh
from meshwright_worker.models.dropout import Slice, drop_out
from meshwright_worker.models.experts import mixtures_of
from meshwright_worker.models.initialize import initialize
from meshwright_worker.models.llama import DecoderStage
from meshwright_worker.models.lora import adapt
from meshwright_worker.parallel.context import Groups, groups_of, share_rows
from meshwright_worker.parallel.expert import shard_experts_over_replicas, spread_experts
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
    division = division_of(run, model)
    stages = len(division.layers)
    # Once for all stages: forming groups is collective, and ranks may hold different numbers of them.
    sharing = groups_of(Deal.of(run), mesh)
    return [
        _build(run, model, mesh, sharing, index, stages, division.layers[index])
        for index in division.stages(mesh.coordinates.pipeline)
    ]


def division_of(run: RunConfig, model: Architecture) -> Division:
    """The run's pipeline: its schedule, and which stages and layers each of its ranks holds.

    Raises:
        ValueError: `run` is not a run of this runtime.
    """
    if run.training is None:
        raise ValueError("`training` is required")
    return divide(run.parallelism, run.pipeline, run.micro_batches, model, run.training.sequence_length)


def _build(
    run: RunConfig, model: Architecture, mesh: Mesh, sharing: Groups, index: int, stages: int, own: range
) -> BuiltStage:
    if run.training is None:
        raise ValueError("`training` is required")
    precision = run.training.precision
    with torch.device("meta"):
        stage = DecoderStage(model, compute_dtype(precision), index, stages, own).to(stored_dtype(run.training))
    if run.training.lora is not None:
        adapt(stage, run.training.lora)
    if run.context > 1 or packs_documents(run):
        share_rows(stage, Deal.of(run), sharing)
    spread_experts(stage, mesh, sequence=run.parallelism.sequence, tensor=run.parallelism.expert_tensor)
    if mesh.layout.tensor > 1:
        asked = run.parallelism
        split_over_tensor_group(stage, mesh.devices[TENSOR], sequence=asked.sequence, overlap=asked.tensor_overlap)
    _equip(stage, run.training, model, mesh, sequence=run.parallelism.sequence)
    if shards_over_replicas(run):
        zero, offload = run.parallelism.zero_stage, parameter_offload(run.training, mesh.device)
        shard_experts_over_replicas(stage, mesh, zero_stage=zero, precision=precision, offload=offload)
        shard_over_replicas(stage, mesh.hybrid or mesh.replicas, run.parallelism, precision, offload)
    initialize(stage, model, run.training.seed, mesh.device, home_of_parameters(run.training, mesh.device))
    save_memory(stage, run.training, mesh.device)
    if not shards_over_replicas(run):
        return BuiltStage(index, stage, compute_on_local(stage))
    settle(stage)
    distributed: dict[str, DTensor] = {
        name: value for name, value in stage.named_parameters() if isinstance(value, DTensor)
    }
    return BuiltStage(index, stage, distributed)


def _equip(stage: DecoderStage, training: TrainingSpec, model: Architecture, mesh: Mesh, *, sequence: bool) -> None:
    """Put in what knows which part of a layer this rank has."""
    tensor = mesh.layout.tensor
    group = mesh.group(TENSOR) if tensor > 1 else None
    if training.fp8 is not None:
        context = mesh.group(CONTEXT) if mesh.layout.context > 1 else None
        spread = mesh.group(EXPERT) if mesh.layout.expert > 1 else None
        use_fp8(stage, training.fp8, group, context)
        for _, mixture in mixtures_of(stage):
            use_fp8_in_experts(mixture.experts, training.fp8, group, spread, context)
    if training.dropout or training.attention_dropout:
        drop_out(stage, model.heads, training, Slice(mesh.coordinates.tensor, tensor, sequence and tensor > 1))
    if training.loss_chunk_tokens is not None:
        chunk_loss(stage, training.loss_chunk_tokens, group, sequence=sequence)


def shards_over_replicas(run: RunConfig) -> bool:
    """Whether FSDP shards parameters over replicas; a single replica has nobody to share with."""
    return engine_of(run.parallelism) is Engine.FSDP and run.layout.replicas > run.islands


def packs_documents(run: RunConfig) -> bool:
    """Whether rows are made of documents that attention keeps apart."""
    return run.data is not None and run.data.packing is Packing.DOCUMENTS
