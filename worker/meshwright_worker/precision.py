"""Number formats: parameters, gradients' reduction and optimizer state are fp32; compute is what the job asks for.

Modules cast explicitly instead of relying on autocast, because FSDP2 casts parameters itself: written out, replicated
and sharded parameters go through the same roundings.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from meshwright.api.spec import Precision

PARAMETER_DTYPE = torch.float32

_COMPUTE = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16}


def compute_dtype(precision: Precision) -> torch.dtype:
    """The format of activations and matrix products."""
    return _COMPUTE[precision]


def sharding_policy(precision: Precision) -> MixedPrecisionPolicy:
    """FSDP2's casts: parameters are gathered in the compute format, gradients are reduced in fp32."""
    return MixedPrecisionPolicy(
        param_dtype=compute_dtype(precision), reduce_dtype=PARAMETER_DTYPE, cast_forward_inputs=False
    )
