"""What a run asks for to save memory, put on a stage. The order stands here."""

from __future__ import annotations

import torch

from meshwright.api.spec import TrainingSpec
from meshwright_worker.memory.activation_offload import offload_activations
from meshwright_worker.memory.checkpointing import checkpoint_activations, group_size
from meshwright_worker.models.llama import DecoderStage


def save_memory(stage: DecoderStage, training: TrainingSpec, device: torch.device) -> None:
    """Checkpoint, then offload: what is recomputed is not kept, so it is not offloaded either."""
    how, every = training.activation_checkpointing, training.checkpoint_every
    checkpoint_activations(stage, how, every)
    if training.activation_offload:
        offload_activations(stage, group_size(how, every, len(stage.layers)), device)
