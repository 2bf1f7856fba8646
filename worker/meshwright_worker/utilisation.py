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
from meshwright.models.flops import (
    forward_flops_per_token,
    recomputed_flops_per_token,
    trained_flops_per_token,
)
from meshwright.planner.cost.accelerators import accelerator

_COUNTED_AGAIN = (ActivationCheckpointing.FULL, ActivationCheckpointing.EVERY_K, ActivationCheckpointing.SQRT)
"""`Selective` keeps every matrix product: what it computes again is not counted in FLOPs at all."""


@dataclass(frozen=True, slots=True)
class Work:
    """The operations of one step of the whole job."""

    model: float
    hardware: float
    peak: float | None
    """FLOP/s of all of the job's GPUs; None where they are not known."""


def work_of(
    architecture: Architecture,
    training: TrainingSpec,
    ranks: int,
    device: torch.device,
    *,
    rematerializes: bool = False,
) -> Work:
    """The work of each step of a run on `ranks` devices like this rank's; `rematerializes` of its pipeline's stages."""
    tokens, length, lora = (
        training.global_batch_size * training.sequence_length,
        training.sequence_length,
        training.lora,
    )
    model = trained_flops_per_token(architecture, length, lora)
    again = forward_flops_per_token(architecture, length, lora) if rematerializes else 0
    if training.checkpointing in _COUNTED_AGAIN:
        again += recomputed_flops_per_token(architecture, length, lora)
    known = accelerator(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return Work(float(tokens * model), float(tokens * (model + again)), known.half * ranks if known else None)
