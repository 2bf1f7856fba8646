"""The interface of data parallelism to the training step, and the choice of an implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from meshwright.api.data_parallel import DataParallelEngine
from meshwright.protocol.run_config import NativeRun
from meshwright.schedules.registry import kind_of
from meshwright_worker.distributed.mesh import Mesh
from meshwright_worker.dtypes import compute_dtype
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.parallel.data.compression.state import CompressionState
from meshwright_worker.parallel.data.ddp import BucketedAllReduce
from meshwright_worker.parallel.data.fp8_gather import Fp8Shards, gathered_fp8
from meshwright_worker.parallel.data.sharded_masters import ShardedMasters
from meshwright_worker.parallel.data.zero import ZeroShards
from meshwright_worker.parallel.shards import ParameterShard


class DataParallel(Protocol):
    """Reduces gradients over replicas and synchronizes updated parameters."""

    @property
    def shards(self) -> Sequence[ParameterShard]:
        """The tensors that this rank updates, norms, clips and saves: its parameters, or its shards of them."""

    @property
    def compression_state(self) -> CompressionState | None:
        """Residuals of gradient compression that a checkpoint must contain; None without compression."""

    def reduce(self) -> list[torch.Tensor]:
        """Return the shards' gradients, summed over replicas, after the step's last backward pass. Collective."""

    def sync_parameters(self) -> None:
        """Give every replica the parameters that other replicas updated or loaded. Collective. They may only be
        complete for the modules that use them, when these run.
        """

    def finish(self) -> None:
        """Wait until all parameters are complete. Collective."""


class NoReduction:
    """For FSDP, which has already summed gradients over replicas, or for a single replica.

    Args:
        shards: of all stages.
        quantized: the shards that FSDP gathers in fp8; None if there are none.
    """

    compression_state = None

    def __init__(self, shards: Sequence[ParameterShard], quantized: Fp8Shards | None = None) -> None:
        self.shards = shards
        self._quantized = quantized

    def reduce(self) -> list[torch.Tensor]:
        """See `DataParallel.reduce`."""
        return [shard.gradient() for shard in self.shards]

    def sync_parameters(self) -> None:
        """See `DataParallel.sync_parameters`: passes gather the parameters."""
        if self._quantized is not None:
            self._quantized.update()

    def finish(self) -> None:
        """See `DataParallel.finish`."""


def build_data_parallel(
    run: NativeRun, stages: Sequence[DecoderStage], shards: Sequence[ParameterShard], mesh: Mesh
) -> DataParallel:
    """Build the implementation of `parallelism.dataParallel` for the shards of all stages of this rank."""
    engine = run.parallelism.data_parallel_engine
    fp8 = gathered_fp8(run)
    if fp8 is not None:
        return NoReduction(shards, Fp8Shards(stages, fp8, compute_dtype(run.training.precision), mesh))
    if mesh.replicas.size() == 1 or engine is DataParallelEngine.FSDP:
        return NoReduction(shards)
    # Other schedules compute weight gradients separately, past autograd's hooks, or partly on another rank.
    hooks = run.pipeline == 1 or kind_of(run.parallelism.order).whole_backward
    masters = run.training.sharded_masters
    if masters is not None and run.shards_masters:
        return ShardedMasters(shards, stages, mesh, run.parallelism, run.micro_batches, masters.gradients, watch=hooks)
    if engine is DataParallelEngine.FLAT:
        return ZeroShards(shards, mesh, run.parallelism, run.micro_batches, watch=hooks)
    spec = run.parallelism.data_parallel
    return BucketedAllReduce(shards, mesh, spec, run.micro_batches, overlap=hooks and spec.overlap)
