"""What a run asks for to save memory, put on a stage. The order stands here."""

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
    """Checkpoint, then offload, then compile: what is recomputed is not kept, so it is not offloaded either.

    Parameters are there.
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
    """Where FSDP keeps shards: page-locked in main memory if the run offloads parameters from a GPU.

    Pages of a file are not locked: what is locked stays in main memory.
    """
    if not training.parameter_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device.type == "cuda" and training.parameter_offload_path is None)


def parameter_device(training: TrainingSpec, device: torch.device) -> torch.device:
    """Where this rank's shards of parameters are between uses."""
    return torch.device("cpu") if training.parameter_offload else device
