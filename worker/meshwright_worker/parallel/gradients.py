"""The gradients of a step made whole: summed over the tensor group where partial, summed over replicas, clipped.

Every loss is divided by the tokens of the whole step before its backward pass, so what is left to do is to add up.
Replicas that hold all of their parameters (ZeRO 0) add gradients here, in fp32 and in a few large buckets, once a
step after the last micro-batch. That is what DDP does under `no_sync`, without its hooks, which see neither DTensors
nor the pipeline's own calls of backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from meshwright_worker.mesh import EXPERT_REPLICA, REPLICA, TENSOR, Mesh
from meshwright_worker.parallel.shards import Shard

_BUCKET_ELEMENTS = 16 * 1024 * 1024


def reduce_gradients(shards: Sequence[Shard], mesh: Mesh) -> list[torch.Tensor]:
    """Make every gradient that of the global batch's mean loss; one tensor per shard, in its place."""
    gradients = [shard.gradient() for shard in shards]
    partial = [gradient for gradient, shard in zip(gradients, shards, strict=True) if shard.partial]
    if mesh.layout.tensor > 1:
        _all_reduce(partial, mesh.group(TENSOR))
    for group, spread in ((REPLICA, False), (EXPERT_REPLICA, True)):
        replicated = [
            g for g, shard in zip(gradients, shards, strict=True) if shard.replicated and shard.expert is spread
        ]
        if replicated and mesh.group(group).size() > 1:
            _all_reduce(replicated, mesh.group(group))
    return gradients


def square_sum(shards: Sequence[Shard], gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """This rank's part of the squared global gradient norm, fp64 []: the sum of it over all ranks counts each element
    of each parameter once.
    """
    counted = [gradient for gradient, shard in zip(gradients, shards, strict=True) if shard.counted]
    if not counted:
        return torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    wide = torch.promote_types(counted[0].dtype, torch.float32)
    norms = torch._foreach_norm(counted, 2, dtype=wide)
    return torch.stack(list(norms)).double().square().sum()


def rescale(gradients: Sequence[torch.Tensor], factor: float, norm: float, limit: float) -> None:
    """Scale gradients in place by `factor`, and so that their global norm, `norm` after it, is at most `limit`.

    A limit of 0 clips nothing.
    """
    if limit and norm > limit:
        factor *= limit / norm
    if factor != 1.0:
        torch._foreach_mul_(list(gradients), factor)


def _all_reduce(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    pending = []
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        pending.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for bucket, flat, work in pending:
        work.wait()
        parts = torch.split(flat, [tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    elements = 0
    for tensor in tensors:
        if bucket and elements + tensor.numel() > _BUCKET_ELEMENTS:
            yield bucket
            bucket, elements = [], 0
        bucket.append(tensor)
        elements += tensor.numel()
    if bucket:
        yield bucket
