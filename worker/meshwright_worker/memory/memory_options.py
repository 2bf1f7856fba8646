"""Applies a run's memory-saving options to a stage. This module defines their order."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from meshwright.api.training import ActivationCheckpointing, TrainingSpec
from meshwright_worker.memory.activation_checkpointing import checkpoint_activations, group_size
from meshwright_worker.memory.activation_offload import offload_activations
from meshwright_worker.memory.parameter_offload import offload_parameters_to_files
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.parallel.compile_layers import compile_layers


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
