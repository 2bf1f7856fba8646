"""Builds the model in the layout of its mesh. This is the only module that defines the order of the steps.

1. build on the meta device, with adapters if any: this allocates no memory;
2. set up attention over the context group: it has no parameters;
3. distribute experts over the expert group and split layers over the tensor group: matrices become DTensors; install
  the modules that know which part of a layer this rank has (fp8 products, dropout, the chunked loss);
4. shard over replicas (FSDP2), and experts over their own replicas: shards of the shards of step 3;
5. allocate memory for this rank's shards, and draw their initial weights unless a checkpoint may have them;
6. add activation checkpointing and offloading, and compile: these change how layers run, not the layers;
7. without FSDP, let modules compute directly on the local parts.

In the other order, FSDP would gather what tensor parallelism is about to split; and if weights were allocated before
step 4, the entire model would have to fit on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from meshwright.api.training import ActivationCheckpointing, TrainingSpec
from meshwright.models.architecture import Architecture
from meshwright.schedules.pipeline_layout import PipelineLayout, pipeline_layout
from meshwright.sequence_sharding import SequenceSharding
from meshwright_worker.distributed.mesh import CONTEXT, EXPERT, TENSOR, Mesh
from meshwright_worker.dtypes import compute_dtype, stored_dtype
from meshwright_worker.memory.activation_checkpointing import checkpoint_activations, group_size, selective_checkpoint
from meshwright_worker.memory.activation_offload import offload_activations
from meshwright_worker.models.attention import AttentionCore, needs_equal_head_sizes
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.dropout import TensorSlice, apply_dropout
from meshwright_worker.models.init_weights import allocate, init_weights
from meshwright_worker.models.lora import apply_lora
from meshwright_worker.models.moe import iter_moe_layers
from meshwright_worker.parallel.context.context_parallel import (
    ContextGroups,
    build_context_groups,
    exclude_attention_from_graphs,
    install_context_attention,
)
from meshwright_worker.parallel.data.fsdp import apply_fsdp, preallocate_fsdp_storage, uses_fsdp
from meshwright_worker.parallel.data.parameter_offload import offload_parameters_to_files
from meshwright_worker.parallel.expert.expert_parallel import (
    apply_expert_parallel,
    apply_fsdp_to_experts,
    expert_nodes,
)
from meshwright_worker.parallel.tensor.async_tensor_parallel import ring_matmuls
from meshwright_worker.parallel.tensor.cross_entropy import ChunkedLoss, use_chunked_loss
from meshwright_worker.parallel.tensor.tensor_parallel import apply_tensor_parallel, use_local_parameters
from meshwright_worker.precision.fp8.grouped_linear import convert_experts_to_fp8
from meshwright_worker.precision.fp8.linear import convert_to_fp8
from meshwright_worker.precision.fp8.scaling_recipe import fp8_recipes
from meshwright_worker.rank.task import ModelRun


@dataclass(frozen=True)
class LocalStage:
    """This rank's part of one stage."""

    index: int
    """The stage's index in the model."""
    module: DecoderStage
    distributed: dict[str, DTensor]
    """The parameters that are parts of larger ones, by name."""


def build_stages(run: ModelRun, mesh: Mesh, *, draw: bool = True) -> list[LocalStage]:
    """Build this rank's shards of its stages, with initial weights, or without values if not `draw`."""
    pipeline = pipeline_layout_of(run)
    stages = len(pipeline.layers)
    # Once for all stages: creating groups is collective, and ranks may have different numbers of stages.
    context_groups = build_context_groups(SequenceSharding.of(run), mesh)
    nodes = expert_nodes(run.parallelism, mesh) if run.architecture.mixture is not None else None
    return [
        _build_stage(run, mesh, context_groups, nodes, index, stages, pipeline.layers[index], draw=draw)
        for index in pipeline.stages(mesh.coordinates.pipeline)
    ]


def pipeline_layout_of(run: ModelRun) -> PipelineLayout:
    """Return the run's pipeline layout: its schedule, and the stages and layers of each rank."""
    length = run.training.sequence_length
    return pipeline_layout(run.parallelism, run.pipeline, run.micro_batches, run.architecture, length)


def _build_stage(
    run: ModelRun,
    mesh: Mesh,
    context_groups: ContextGroups,
    nodes: DeviceMesh | None,
    index: int,
    stages: int,
    layer_indices: range,
    *,
    draw: bool,
) -> LocalStage:
    model, precision = run.architecture, run.training.precision
    with torch.device("meta"):
        stage = DecoderStage(model, compute_dtype(precision), index, stages, layer_indices).to(stored_dtype(run))
    if run.training.lora is not None:
        apply_lora(stage, run.training.lora)
    if run.context > 1 or run.packs_documents or run.uses_sliding_window:
        varlen = bool(run.training.varlen_attention)
        install_context_attention(stage, SequenceSharding.of(run), context_groups, varlen=varlen)
    apply_expert_parallel(stage, mesh, run.parallelism, nodes)
    if mesh.layout.tensor > 1:
        asked = run.parallelism
        apply_tensor_parallel(stage, mesh.device_mesh[TENSOR], sequence=asked.sequence, overlap=asked.tensor_overlap)
    _apply_local_features(stage, run.training, model, mesh, sequence=run.parallelism.sequence)
    if uses_fsdp(run):
        zero, offload = run.parallelism.zero_stage_or_default, parameter_offload(run.training, mesh.device)
        apply_fsdp_to_experts(stage, mesh, zero_stage=zero, precision=precision, offload=offload)
        apply_fsdp(stage, mesh.hsdp_mesh or mesh.replicas, run.parallelism, precision, offload)
    storage = parameter_device(run.training, mesh.device)
    if draw:
        init_weights(stage, model, run.training.seed, mesh.device, storage)
    else:
        allocate(stage, mesh.device, storage)
    apply_memory_options(stage, run.training, mesh.device)
    if not uses_fsdp(run):
        return LocalStage(index, stage, use_local_parameters(stage))
    preallocate_fsdp_storage(stage)
    distributed: dict[str, DTensor] = {
        name: value for name, value in stage.named_parameters() if isinstance(value, DTensor)
    }
    return LocalStage(index, stage, distributed)


def _apply_local_features(
    stage: DecoderStage, training: TrainingSpec, model: Architecture, mesh: Mesh, *, sequence: bool
) -> None:
    """Install the modules that know which part of a layer this rank has, and what its device can do."""
    tensor = mesh.layout.tensor
    pads_values = needs_equal_head_sizes(mesh.device, deterministic=training.deterministic)
    for module in stage.modules():
        if isinstance(module, AttentionCore):
            module.pads_values = pads_values
    group = mesh.group(TENSOR) if tensor > 1 else None
    if training.fp8 is not None:
        context = mesh.group(CONTEXT) if mesh.layout.context > 1 else None
        expert_group = mesh.group(EXPERT) if mesh.layout.expert > 1 else None
        convert_to_fp8(stage, training.fp8, group, context)
        for _, mixture in iter_moe_layers(stage):
            convert_experts_to_fp8(mixture.experts, training.fp8, group, expert_group, context)
    if training.dropout or training.attention_dropout:
        apply_dropout(
            stage, model.heads, training, TensorSlice(mesh.coordinates.tensor, tensor, sequence and tensor > 1)
        )
    if training.loss_chunk_tokens is not None:
        use_chunked_loss(stage, training.loss_chunk_tokens, group, sequence=sequence)


def compile_layers(
    stage: DecoderStage, backend: str | Callable[..., Any] = "inductor", *, selective: bool = False
) -> None:
    """Make the blocks of a stage run compiled code from their first batch on; `backend` is torch.compile's.

    Layers are compiled one by one: one graph serves all identical layers and is compiled once. A layer's hooks, above
    all the gathering of its parameters, stay outside of the graph. Collectives inside a block break the graph into
    pieces; each matrix product is still fused with its neighbors. A chunked loss is compiled, too.

    With `selective`, what the blocks save is decided inside their graphs, see `selective_checkpoint`. A block that
    breaks its graph then raises `torch._dynamo.exc.Unsupported` in its first pass.
    """
    for product in fp8_recipes(stage):
        product.compile()
    for ring in ring_matmuls(stage):
        ring.compile()
    exclude_attention_from_graphs(stage)
    if isinstance(stage.chunked_loss, ChunkedLoss):
        stage.chunked_loss.compile_passes(backend)
    for block in stage.layers.values():
        run = selective_checkpoint(block.forward) if selective else block.forward
        block.forward = torch.compile(run, backend=backend, fullgraph=selective)


def apply_memory_options(stage: DecoderStage, training: TrainingSpec, device: torch.device) -> None:
    """Apply checkpointing, then offloading, then compilation: what is recomputed is not saved, and so not offloaded.

    The parameters must be materialized.
    """
    mode, every = training.checkpointing, training.checkpoint_every
    checkpoint_in_graph = training.compile and mode is ActivationCheckpointing.SELECTIVE
    if not checkpoint_in_graph:
        checkpoint_activations(stage, mode, every)
    if training.activation_offload:
        offload_activations(stage, group_size(mode, every, len(stage.layers)), device)
    if training.parameter_offload_path is not None:
        offload_parameters_to_files(stage, training.parameter_offload_path)
    if training.compile:
        compile_layers(stage, selective=checkpoint_in_graph)


def parameter_offload(training: TrainingSpec, device: torch.device) -> OffloadPolicy:
    """Return where FSDP stores shards: in pinned host memory if the run offloads parameters from a GPU.

    Memory of mapped files is not pinned, since pinned memory cannot be paged out.
    """
    if not training.parameter_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device.type == "cuda" and training.parameter_offload_path is None)


def parameter_device(training: TrainingSpec, device: torch.device) -> torch.device:
    """Return the device of this rank's parameter shards between uses."""
    return torch.device("cpu") if training.parameter_offload else device
