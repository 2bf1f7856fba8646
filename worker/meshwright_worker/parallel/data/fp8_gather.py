"""`training.fp8.allGather`: FSDP gathers the weights of fp8 products in fp8, half of bf16's bytes.

A scale is a function of a whole weight's largest number, so it is known before the weight is gathered: after each
update one reduction finds those of all weights, and each rank quantizes its rows. FSDP gathers their bytes in every
pass, and products take them as they are: the numbers that they would compute from the gathered weight, bit by bit.
Parameters, optimizer and checkpoints do not change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from meshwright.api.precision import Fp8Spec, Fp8Update
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.distributed.mesh import SHARD, TENSOR, Mesh
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.layers import Linear
from meshwright_worker.parallel.data.fsdp import PaddedShard, padded_shards, uses_fsdp
from meshwright_worker.precision.fp8.gathered_weight import GatheredWeight
from meshwright_worker.precision.fp8.linear import Fp8Product
from meshwright_worker.precision.fp8.quantize import FORWARD, quantize_by, scale_for

_WITHOUT = "remove `training.fp8.allGather`"


class Fp8Gather:
    """Makes FSDP gather one weight's quantized rows; the names and arguments are FSDP's."""

    def __init__(self, rows: torch.Tensor, scale: torch.Tensor) -> None:
        self._rows, self._scale = rows, scale

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor], None]:
        """Return this rank's rows."""
        return (self._rows,), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[GatheredWeight, tuple[torch.Tensor]] | None:
        """Return the weight and its memory. `out` is what an earlier call returned: its bytes are there again, and its
        scale is that of `Fp8Shards`.
        """
        if out is not None:
            return None
        (values,) = all_gather_outputs
        return GatheredWeight(values, self._scale, param_dtype), (values,)


class Fp8Shards:
    """This rank's rows of all weights that are gathered in fp8, quantized, and their scales.

    Args:
        stages: sharded by FSDP, with memory.
        spec: the scaling method: one scale per tensor, not delayed.
        compute: the format that weights would be gathered in.
        mesh: this rank's mesh.
    """

    def __init__(self, stages: Iterable[DecoderStage], spec: Fp8Spec, compute: torch.dtype, mesh: Mesh) -> None:
        self._compute = compute
        self._groups = [mesh.group(SHARD), *([mesh.group(TENSOR)] if mesh.layout.tensor > 1 else [])]
        self._shards = [shard for stage in stages for shard in padded_shards(stage, _WITHOUT) if _is_fp8(shard)]
        self._fixed = spec.update is Fp8Update.STATIC
        amax = torch.full((len(self._shards),), spec.weight_amax, device=mesh.device)
        self._scales = scale_for(amax, FORWARD)
        self._rows = [torch.empty_like(shard(), dtype=FORWARD) for shard in self._shards]
        for shard, rows, scale in zip(self._shards, self._rows, self._scales.unbind(), strict=True):
            shard.extend_gather(Fp8Gather(rows, scale))
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Quantize the current rows. Collective: one reduction, and another one if there is a tensor group."""
        if not self._shards:
            return
        if not self._fixed:
            largest = torch._foreach_norm([shard() for shard in self._shards], math.inf)
            # Rounding keeps the order, so these are the largest of the rounded numbers.
            amax = torch.stack(list(largest)).to(self._compute).float()
            for group in self._groups:
                dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
            self._scales.copy_(scale_for(amax, FORWARD))
        for shard, rows, scale in zip(self._shards, self._rows, self._scales.unbind(), strict=True):
            rows.copy_(quantize_by(shard().to(self._compute), scale, FORWARD))


def gathered_fp8(run: NativeRun) -> Fp8Spec | None:
    """Return the scaling method of the weights that FSDP gathers in fp8; None if it gathers none so."""
    fp8 = run.training.fp8
    return fp8 if fp8 is not None and fp8.all_gather and uses_fsdp(run) else None


def _is_fp8(shard: PaddedShard) -> bool:
    module = shard.module
    return isinstance(module, Linear) and isinstance(module.product, Fp8Product) and shard.name == "weight"
