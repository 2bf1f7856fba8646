"""Number formats: fp32 for parameters, gradient reduction and optimizer state; the job sets the compute format.

With `fp64` everything is fp64: use it to verify a layout, since differences are then rounding errors of the sixteenth
digit.

Modules cast explicitly instead of relying on autocast, because FSDP2 casts parameters itself: with explicit casts,
replicated and sharded parameters are rounded in the same places.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from meshwright.api.precision import Precision
from meshwright_worker.rank.task import ModelRun

PARAMETER_DTYPE = torch.float32
"""The format of parameters, except for `fp64`."""

_COMPUTE = {
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
    Precision.FP64: torch.float64,
}


def compute_dtype(precision: Precision) -> torch.dtype:
    """The format of activations and matrix products."""
    return _COMPUTE[precision]


def parameter_dtype(precision: Precision) -> torch.dtype:
    """The format of parameters that have master weights, and of the reduction of gradients."""
    return torch.float64 if precision is Precision.FP64 else PARAMETER_DTYPE


def stored_dtype(run: ModelRun) -> torch.dtype:
    """The format of a model's parameters."""
    training = run.training
    has_masters_elsewhere = run.shards_masters or not training.master_weights
    return torch.bfloat16 if has_masters_elsewhere else parameter_dtype(training.precision)


WIDE_DTYPES = (torch.float32, torch.float64)
"""The formats of sums over many numbers."""


def upcast(x: torch.Tensor) -> torch.Tensor:
    """Return `x` in fp32, or unchanged if it is in fp64: for sums over many numbers."""
    return x if x.dtype == torch.float64 else x.float()


def sharding_policy(precision: Precision) -> MixedPrecisionPolicy:
    """Return FSDP2's casts: parameters are gathered in the compute format, gradients are reduced in the parameters'
    format.
    """
    return MixedPrecisionPolicy(
        param_dtype=compute_dtype(precision), reduce_dtype=parameter_dtype(precision), cast_forward_inputs=False
    )
