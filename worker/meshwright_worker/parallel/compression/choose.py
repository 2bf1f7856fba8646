"""The compressor of a name."""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright.api.replicas import DataParallelSpec, GradientCompression
from meshwright_worker.parallel.compression.compressor import Compressor, Whole
from meshwright_worker.parallel.compression.half import Half
from meshwright_worker.parallel.compression.int8 import Int8
from meshwright_worker.parallel.compression.powersgd import PowerSGD
from meshwright_worker.parallel.compression.topk import TopK


def compressor_of(spec: DataParallelSpec, group: dist.ProcessGroup) -> Compressor:
    """How `spec.compression` sums a bucket over the ranks of a group."""
    match spec.compression:
        case GradientCompression.NONE:
            return Whole(group)
        case GradientCompression.FP16:
            return Half(group, torch.float16)
        case GradientCompression.BF16:
            return Half(group, torch.bfloat16)
        case GradientCompression.INT8:
            return Int8(group)
        case GradientCompression.TOP_K:
            return TopK(group, spec.compression_density)
        case GradientCompression.POWER_SGD:
            return PowerSGD(group, spec.compression_rank)
