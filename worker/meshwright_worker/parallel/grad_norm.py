"""Gradients that replicas have summed: what is left to add up, their norm, and clipping.

Every loss is divided by the tokens of the whole step before its backward pass, so all that is done is to add up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from meshwright_worker.distributed.collectives import all_reduce_on
from meshwright_worker.parallel.shards import ParameterShard


def all_reduce_partial(
    shards: Sequence[ParameterShard], gradients: Sequence[torch.Tensor], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Add up, in place and in one all-reduce, the gradients of which each rank of a tensor group has its positions'.

    `device` is the group's, whether or not the gradients are there.
    """
    partial = [gradient for gradient, shard in zip(gradients, shards, strict=True) if shard.partial]
    if not partial:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in partial])
    all_reduce_on(device, flat, group)
    parts = torch.split(flat, [gradient.numel() for gradient in partial])
    for gradient, part in zip(partial, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def local_square_sum(shards: Sequence[ParameterShard], gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """This rank's part of the squared global gradient norm, fp64 []: the sum of it over all ranks counts each element
    of each parameter once.
    """
    counted = [gradient for gradient, shard in zip(gradients, shards, strict=True) if shard.counted]
    if not counted:
        return torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    wide = torch.promote_types(counted[0].dtype, torch.float32)
    norms = torch._foreach_norm(counted, 2, dtype=wide)
    return torch.stack(list(norms)).double().square().sum()


def scale_and_clip(gradients: Sequence[torch.Tensor], factor: float, norm: float, limit: float) -> None:
    """Scale gradients in place by `factor`, and so that their global norm, `norm` after it, is at most `limit`.

    A limit of 0 clips nothing.
    """
    if limit and norm > limit:
        factor *= limit / norm
    if factor != 1.0:
        torch._foreach_mul_(list(gradients), factor)
