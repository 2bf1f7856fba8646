"""What a step's floating-point operations are, against what the GPUs could have done meanwhile.

Model FLOPs (for MFU, arXiv 2204.02311) are 6·N + 12·L·d·s a token, with adapters 4·N of what is frozen; hardware FLOPs
(for HFU) add what activation checkpointing and `parallelism.rematerialize` compute again, as whole forward passes. Both
are measured against the dense bf16 peak, whatever the format, so that numbers can be compared; without a known GPU
there is no peak and no utilisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright.api.training import ActivationCheckpointing, TrainingSpec
from meshwright.models.architecture import Architecture
from meshwright.models.model_flops import (
    forward_flops_per_token,
    recomputed_flops_per_token,
    trained_flops_per_token,
)
from meshwright.planner.cost.accelerators import accelerator
from meshwright_worker.trainer.micro_batches import TokenCounts

_RECOMPUTES_LAYERS = (ActivationCheckpointing.FULL, ActivationCheckpointing.EVERY_K, ActivationCheckpointing.SQRT)
"""`Selective` keeps every matrix product: what it computes again is not counted in FLOPs at all."""


@dataclass(frozen=True, slots=True)
class StepFlops:
    """The operations of one step of the whole job."""

    model: float
    hardware: float
    peak: float | None
    """FLOP/s of all of the job's GPUs; None where they are not known."""


def step_flops(
    architecture: Architecture,
    training: TrainingSpec,
    ranks: int,
    device: torch.device,
    token_counts: TokenCounts | None = None,
    *,
    rematerializes: bool = False,
) -> StepFlops:
    """The work of a step of a run on `ranks` devices like this rank's; `token_counts` is what its rows hold, if not
    whole ones,
    `rematerializes` of its pipeline's stages.

    Padding is no work, whether it is computed or not.
    """
    tokens, length, lora = (
        training.global_batch_size * training.sequence_length,
        training.sequence_length,
        training.lora,
    )
    if token_counts is not None:
        # Operations a token are linear in the length of its row: those of all are as if each row were as long as this.
        tokens, length = token_counts.tokens, round(token_counts.squares / max(1, token_counts.tokens))
    model = trained_flops_per_token(architecture, length, lora)
    recomputed = forward_flops_per_token(architecture, length, lora) if rematerializes else 0
    if training.checkpointing in _RECOMPUTES_LAYERS:
        recomputed += recomputed_flops_per_token(architecture, length, lora)
    gpu = accelerator(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return StepFlops(float(tokens * model), float(tokens * (model + recomputed)), gpu.half * ranks if gpu else None)
