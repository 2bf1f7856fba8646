"""Builds the compressor that the spec names."""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright.api.data_parallel import DataParallelSpec, GradientCompression
from meshwright_worker.parallel.data.compression.compressor import Compressor, NoCompression
from meshwright_worker.parallel.data.compression.half_precision import HalfPrecision
from meshwright_worker.parallel.data.compression.int8 import Int8
from meshwright_worker.parallel.data.compression.powersgd import PowerSGD
from meshwright_worker.parallel.data.compression.topk import TopK


def build_compressor(spec: DataParallelSpec, group: dist.ProcessGroup) -> Compressor:
    """Return the compressor that sums buckets over a group according to `spec.compression`."""
    match spec.compression:
        case GradientCompression.NONE:
            return NoCompression(group)
        case GradientCompression.FP16:
            return HalfPrecision(group, torch.float16)
        case GradientCompression.BF16:
            return HalfPrecision(group, torch.bfloat16)
        case GradientCompression.INT8:
            return Int8(group)
        case GradientCompression.TOP_K:
            return TopK(group, spec.compression_density)
        case GradientCompression.POWER_SGD:
            return PowerSGD(group, spec.compression_rank)
