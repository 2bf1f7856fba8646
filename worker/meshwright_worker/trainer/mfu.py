"""Floating-point operations of a step, compared with the peak of the GPUs.

Model FLOPs (for MFU, arXiv 2204.02311) are 6·N + 12·L·d·s per token; with adapters, frozen parameters count 4·N.
Hardware FLOPs (for HFU) add recomputation by activation checkpointing and `parallelism.rematerialize`, as entire
forward passes. Both are compared with the dense bf16 peak, for every number format, so that runs are comparable. If the
GPU is unknown, there is no peak and no utilization.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright.api.training import ActivationCheckpointing, TrainingSpec
from meshwright.models.architecture import Architecture
from meshwright.models.counts import forward_pass_flops, recomputed_layers_flops, training_flops
from meshwright.planner.cost.accelerators import accelerator
from meshwright_worker.trainer.micro_batches import TokenCounts

_RECOMPUTES_LAYERS = (ActivationCheckpointing.FULL, ActivationCheckpointing.EVERY_K, ActivationCheckpointing.SQRT)
"""`Selective` stores the result of every matrix product: what it recomputes does not count in FLOPs."""


@dataclass(frozen=True, slots=True)
class StepFlops:
    """The operations of one step of the entire job."""

    model: float
    hardware: float
    peak: float | None
    """FLOP/s of all of the job's GPUs; None if they are not known."""


def step_flops(
    architecture: Architecture,
    training: TrainingSpec,
    ranks: int,
    device: torch.device,
    token_counts: TokenCounts | None = None,
    *,
    rematerializes: bool = False,
) -> StepFlops:
    """Return the operations of one step on `ranks` devices of this rank's type.

    `token_counts` is the content of the rows, if they are padded. `rematerializes` says whether pipeline stages
    recompute their forward pass. Padding does not count as work, even where it is computed.
    """
    tokens, length, lora = (
        training.global_batch_size * training.sequence_length,
        training.sequence_length,
        training.lora,
    )
    if token_counts is not None:
        # FLOPs per token are linear in the row's length, so rows of different lengths count as rows of this mean
        # length.
        tokens, length = token_counts.tokens, round(token_counts.squares / max(1, token_counts.tokens))
    model = training_flops(architecture, length, lora=lora)
    recomputed = forward_pass_flops(architecture, length, lora) if rematerializes else 0.0
    if training.checkpointing in _RECOMPUTES_LAYERS:
        recomputed += recomputed_layers_flops(architecture, length, lora)
    gpu = accelerator(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return StepFlops(tokens * model, tokens * (model + recomputed), gpu.half * ranks if gpu else None)
