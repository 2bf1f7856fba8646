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
from meshwright_worker.micro_batches import Fed

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
    fed: Fed | None = None,
    *,
    rematerializes: bool = False,
) -> Work:
    """The work of a step of a run on `ranks` devices like this rank's; `fed` is what its rows hold, if not whole ones,
    `rematerializes` of its pipeline's stages.

    Padding is no work, whether it is computed or not.
    """
    tokens, length, lora = (
        training.global_batch_size * training.sequence_length,
        training.sequence_length,
        training.lora,
    )
    if fed is not None:
        # Operations a token are linear in the length of its row: those of all are as if each row were as long as this.
        tokens, length = fed.tokens, round(fed.squares / max(1, fed.tokens))
    model = trained_flops_per_token(architecture, length, lora)
    again = forward_flops_per_token(architecture, length, lora) if rematerializes else 0
    if training.checkpointing in _COUNTED_AGAIN:
        again += recomputed_flops_per_token(architecture, length, lora)
    known = accelerator(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return Work(float(tokens * model), float(tokens * (model + again)), known.half * ranks if known else None)
