"""ZeRO stages 1 and 2 on flat shards (arXiv 1910.02054), without FSDP's module hooks: works with any schedule.

Each replica owns consecutive rows of every parameter, and stores optimizer state only for them. A bucket of gradients
is laid out as [replica, its rows of every tensor] and reduce-scattered. After the update the rows are all-gathered in
the same layout. Together that is an all-reduce's 2 (N - 1) / N times the bytes.

Stage 1 reduces once per step. Stage 2 reduces after each micro-batch and frees the gradients, so that between two
buckets a rank stores only its part of them: N times less memory for M times the reduce-scatters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional as F

from meshwright.api.parallelism import ParallelismSpec
from meshwright_worker.distributed.collectives import all_gather_into, reduce_scatter_into
from meshwright_worker.distributed.mesh import SHARD, SHARD_REPLICA, Mesh
from meshwright_worker.parallel.data.gradient_buckets import BucketScheduler, buckets_of
from meshwright_worker.parallel.shards import ParameterShard, is_split_over_tensor


@dataclass
class _Bucket:
    members: list[ParameterShard]
    """The full tensors to sum."""
    widths: list[int]
    """Elements of each that a replica owns, including the padding of the last one."""
    summed: torch.Tensor | None = None
    """This rank's rows of the gradients, summed over replicas so far."""


class ZeroShards:
    """Reduces gradients to this rank's rows, and gathers updated rows.

    Args:
        shards: of all stages of this rank.
        mesh: its groups `SHARD` and, with `shardSize`, `SHARD_REPLICA`.
        parallelism: the ZeRO stage and its options.
        micro_batches: backward passes of a step.
        watch: whether hooks see the complete gradient; if not, gradients are only reduced after the last pass.
        stored: the format of this rank's rows, in memory of their own; None if they are in the parameters' memory.
    """

    compression_state = None

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        mesh: Mesh,
        parallelism: ParallelismSpec,
        micro_batches: int,
        *,
        watch: bool,
        stored: torch.dtype | None = None,
    ) -> None:
        self._mesh = mesh
        self._group = mesh.group(SHARD)
        spec = parallelism.data_parallel
        self._buckets = [
            _Bucket(members, [_rows(shard.local, self._group.size()) * shard.local[0].numel() for shard in members])
            for members in buckets_of(shards, spec.bucket_elements)
        ]
        self.shards = [_owned_rows(shard, mesh, stored) for shard in shards]
        self._pending: tuple[_Bucket, torch.Tensor, torch.Tensor, dist.Work | None] | None = None
        each_pass = watch and parallelism.zero_stage_or_default == 2
        watched = [bucket.members for bucket in self._buckets] if each_pass or (watch and spec.overlap) else []
        passes, self._rounds = (1, micro_batches) if each_pass else (micro_batches, 1)
        self._started = 0
        self._order = BucketScheduler(watched, passes, self._rounds, self._start)

    def reduce(self) -> list[torch.Tensor]:
        """See `DataParallel.reduce`."""
        self._order.finish()
        for index in range(self._started, len(self._buckets)):
            self._start(index)
        self._wait_pending()
        self._started = 0
        parts: dict[str, torch.Tensor] = {}
        for bucket in self._buckets:
            summed, bucket.summed = bucket.summed, None
            if summed is None:
                raise RuntimeError("a bucket of gradients was not reduced")
            if self._mesh.hsdp_mesh is not None:
                dist.all_reduce(summed, group=self._mesh.group(SHARD_REPLICA))
            for shard, part in zip(bucket.members, torch.split(summed, bucket.widths), strict=True):
                parts[shard.name] = part
        return [parts[own.name][: own.local.numel()].view_as(own.local) for own in self.shards]

    def sync_parameters(self) -> None:
        """See `DataParallel.sync_parameters`."""
        own = {shard.name: shard.local for shard in self.shards}
        for bucket in self._buckets:
            local_rows = torch.cat(
                [
                    F.pad(own[shard.name].flatten(), (0, width - own[shard.name].numel()))
                    for shard, width in zip(bucket.members, bucket.widths, strict=True)
                ]
            )
            gathered = local_rows.new_empty(self._group.size(), len(local_rows))
            all_gather_into(gathered, local_rows, self._group)
            for shard, rows in zip(bucket.members, torch.split(gathered, bucket.widths, dim=1), strict=True):
                shard.local.copy_(rows.flatten()[: shard.local.numel()].view_as(shard.local))

    def finish(self) -> None:
        """See `DataParallel.finish`: `sync_parameters` has waited."""

    def _start(self, index: int) -> None:
        # One collective at a time: a second input buffer would double the memory.
        self._wait_pending()
        bucket, ranks = self._buckets[index], self._group.size()
        columns = []
        for shard, width in zip(bucket.members, bucket.widths, strict=True):
            # If a pass hands over late, its gradient is counted in a later round; the sum is the same.
            grad = shard.parameter.grad
            if grad is None:
                if self._rounds == 1:
                    raise RuntimeError(f"no gradient was computed for {shard.name}")
                grad = torch.zeros_like(shard.local, dtype=shard.parameter.grad_dtype)
            shard.parameter.grad = None
            # Some gradients are assembled past autograd's hooks and tracked by autograd: without this, the sums would
            # be too.
            grad = grad.detach()
            columns.append(F.pad(grad.flatten(), (0, width * ranks - grad.numel())).view(ranks, width))
        send_buffer = torch.cat(columns, dim=1)
        own = torch.empty_like(send_buffer[0])
        self._pending = (bucket, send_buffer, own, reduce_scatter_into(own, send_buffer, self._group, async_op=True))
        self._started += 1

    def _wait_pending(self) -> None:
        if self._pending is None:
            return
        bucket, _, own, work = self._pending
        self._pending = None
        if work is not None:
            work.wait()
        bucket.summed = own if bucket.summed is None else bucket.summed.add_(own)


def _rows(tensor: torch.Tensor, ranks: int) -> int:
    return -(-tensor.shape[0] // ranks)


def _owned_rows(shard: ParameterShard, mesh: Mesh, stored: torch.dtype | None) -> ParameterShard:
    """Return this replica's rows of a shard, in its memory or without values in the format `stored`; split as FSDP
    does, so that checkpoints fit both.
    """
    rows = _rows(shard.local, mesh.shards.size())
    first = rows * mesh.shards.get_local_rank()
    local = shard.local[first : first + rows]
    if stored is not None:
        local = torch.empty_like(local, dtype=stored)
    # A parameter that the tensor group replicates is the same on each of its ranks.
    counted = (is_split_over_tensor(shard.whole) or mesh.coordinates.tensor == 0) and (
        mesh.hsdp_mesh is None or mesh.hsdp_mesh.get_local_rank(SHARD_REPLICA) == 0
    )
    return replace(
        shard, local=local, whole=_owned_dtensor(shard, local, mesh.shards), counted=counted, replicated=False
    )


def _owned_dtensor(shard: ParameterShard, local: torch.Tensor, replicas: DeviceMesh) -> DTensor:
    if shard.whole is None:
        return _as_dtensor(local, replicas, (ShardPlacement(0),), shard.local)
    placements = tuple(shard.whole.placements)
    cuts = sum(placement.is_shard(0) for placement in placements)
    own = _StridedShard(0, split_factor=shard.whole.device_mesh.size()) if cuts else ShardPlacement(0)
    mesh = DeviceMesh._concatenate([replicas, shard.whole.device_mesh])
    return _as_dtensor(local, mesh, (own, *placements), shard.whole)


def _as_dtensor(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], whole: torch.Tensor) -> DTensor:
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
