"""What a run asks for to save memory, put on a stage. The order stands here."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from meshwright.api.training import ActivationCheckpointing, TrainingSpec
from meshwright_worker.memory.activation_offload import offload_activations
from meshwright_worker.memory.checkpointing import checkpoint_activations, group_size
from meshwright_worker.memory.compiled import compile_layers
from meshwright_worker.memory.parameter_file import keep_in_files
from meshwright_worker.models.llama import DecoderStage


def save_memory(stage: DecoderStage, training: TrainingSpec, device: torch.device) -> None:
    """Checkpoint, then offload, then compile: what is recomputed is not kept, so it is not offloaded either.

    Parameters are there.
    """
    how, every = training.checkpointing, training.checkpoint_every
    inside = training.compile and how is ActivationCheckpointing.SELECTIVE
    if not inside:
        checkpoint_activations(stage, how, every)
    if training.activation_offload:
        offload_activations(stage, group_size(how, every, len(stage.layers)), device)
    if training.parameter_offload_path is not None:
        keep_in_files(stage, training.parameter_offload_path)
    if training.compile:
        compile_layers(stage, selective=inside)


def parameter_offload(training: TrainingSpec, device: torch.device) -> OffloadPolicy:
    """Where FSDP keeps shards: page-locked in main memory if the run offloads parameters from a GPU.

    Pages of a file are not locked: what is locked stays in main memory.
    """
    if not training.parameter_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device.type == "cuda" and training.parameter_offload_path is None)


def home_of_parameters(training: TrainingSpec, device: torch.device) -> torch.device:
    """Where this rank's shards of parameters are between uses."""
    return torch.device("cpu") if training.parameter_offload else device
