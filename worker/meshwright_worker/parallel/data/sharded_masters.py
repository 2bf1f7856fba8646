"""ZeRO stages 1 and 2 as published (arXiv 1910.02054): full parameters in bf16, fp32 master weights of own rows only.

A rank of N replicas has 2 bytes of every parameter, and 12 / N of master weights and moments. Gradients in bf16 take 2
bytes in stage 1, and 2 / N in stage 2. Gradients and updated parameters are sent in 2 bytes each, half of what fp32
takes. The other ranks' rows of a master weight exist nowhere on a rank: its forward pass reads the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.api.parallelism import ParallelismSpec
from meshwright.api.precision import GradientFormat
from meshwright_worker.distributed.mesh import SHARD, Mesh
from meshwright_worker.dtypes import PARAMETER_DTYPE
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.parallel.data.parameter_gather import ParameterGather
from meshwright_worker.parallel.data.zero import ZeroShards
from meshwright_worker.parallel.shards import ParameterShard

_DTYPES = {GradientFormat.BF16: torch.bfloat16, GradientFormat.FP32: torch.float32}


class ShardedMasters(ZeroShards):
    """Reduces gradients to this rank's rows, and gathers its updated master weights into the parameters.

    `shards` are the master weights, without values at first: load or draw them, then call `sync_parameters`.

    Args:
        shards: the parameters of all stages of this rank.
        stages: the modules that use them.
        mesh: as of `ZeroShards`.
        parallelism: the ZeRO stage and its options.
        micro_batches: backward passes of a step.
        gradients: in which gradients are summed.
        watch: as of `ZeroShards`.
    """

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        stages: Sequence[DecoderStage],
        mesh: Mesh,
        parallelism: ParallelismSpec,
        micro_batches: int,
        gradients: GradientFormat,
        *,
        watch: bool,
    ) -> None:
        for shard in shards:
            # Autograd converts each backward pass's gradient before it adds it.
            shard.parameter.grad_dtype = _DTYPES[gradients]
        super().__init__(shards, mesh, parallelism, micro_batches, watch=watch, stored=PARAMETER_DTYPE)
        spec = parallelism.data_parallel
        self._gather = ParameterGather(
            shards, self.shards, stages, mesh.group(SHARD), spec.bucket_elements, overlap=spec.overlap
        )

    def sync_parameters(self) -> None:
        """See `DataParallel.sync_parameters`. With `overlap`, modules wait for their parameters when they run next."""
        self._gather.start()

    def finish(self) -> None:
        """See `DataParallel.finish`."""
        self._gather.finish()
