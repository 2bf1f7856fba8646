"""Data parallelism: every replica has all parameters and all-reduces gradients (PyTorch DDP, arXiv 2006.15704).

There is one all-reduce per bucket and step, for any number of micro-batches: 2 (N - 1) / N times the gradients' bytes
on a ring. It overlaps the backward pass of the last micro-batch. It works with every schedule: gradients that hooks
miss are reduced after the last pass. torch's DDP supports neither DTensors nor a pipeline's own calls of backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.api.data_parallel import DataParallelSpec, GradientCompression
from meshwright_worker.distributed.collectives import flatten_tensors, unflatten
from meshwright_worker.distributed.mesh import EXPERT_REPLICA, REPLICA, Mesh
from meshwright_worker.parallel.data.compression.build import build_compressor
from meshwright_worker.parallel.data.compression.compressor import Reduction
from meshwright_worker.parallel.data.compression.state import CompressionState
from meshwright_worker.parallel.data.gradient_buckets import BucketScheduler, buckets_of
from meshwright_worker.parallel.shards import ParameterShard


@dataclass
class _InFlight:
    flat: torch.Tensor
    reduction: Reduction


class BucketedAllReduce:
    """Sums gradients in place.

    Args:
        shards: of all stages of this rank; each `replicated` one is summed.
        mesh: its groups `REPLICA` and, for distributed experts, `EXPERT_REPLICA`.
        spec: bucket size and compression.
        micro_batches: backward passes of a step.
        overlap: whether hooks see the complete gradient, and may start reductions.
    """

    def __init__(
        self, shards: Sequence[ParameterShard], mesh: Mesh, spec: DataParallelSpec, micro_batches: int, *, overlap: bool
    ) -> None:
        self.shards = shards
        summed = [shard for shard in shards if shard.replicated and _group(shard, mesh).size() > 1]
        self._buckets = buckets_of(summed, spec.bucket_elements)
        self._compressors = [build_compressor(spec, _group(bucket[0], mesh)) for bucket in self._buckets]
        compresses = spec.compression is not GradientCompression.NONE
        self.compression_state = CompressionState(self._compressors, self._buckets, spec, mesh) if compresses else None
        self._pending: list[_InFlight] = []
        watched = self._buckets if overlap else []
        self._order = BucketScheduler(watched, micro_batches, 1, self._start)

    def reduce(self) -> list[torch.Tensor]:
        """See `DataParallel.reduce`."""
        self._order.finish()
        for index in range(len(self._pending), len(self._buckets)):
            self._start(index)
        for one in self._pending:
            one.reduction.finish(one.flat)
        self._pending = []
        return [shard.gradient() for shard in self.shards]

    def sync_parameters(self) -> None:
        """See `DataParallel.sync_parameters`: every replica made the same update."""

    def finish(self) -> None:
        """See `DataParallel.finish`."""

    def _start(self, index: int) -> None:
        bucket = self._buckets[index]
        flat = flatten_tensors([shard.gradient() for shard in bucket])
        for shard, part in zip(bucket, unflatten(flat, [shard.parameter for shard in bucket]), strict=True):
            # The gradient is stored in the bucket from here on, so that a step needs no second copy of all gradients.
            shard.parameter.grad = part
        shapes = [shard.local.shape for shard in bucket]
        self._pending.append(_InFlight(flat, self._compressors[index].start(index, flat, shapes)))


def _group(shard: ParameterShard, mesh: Mesh) -> dist.ProcessGroup:
    return mesh.group(EXPERT_REPLICA if shard.expert else REPLICA)
