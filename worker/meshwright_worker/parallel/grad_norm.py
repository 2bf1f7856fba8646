"""The last steps on gradients that are summed over replicas: remaining sums, global norm, clipping.

Every loss is divided by the tokens of the entire step before its backward pass, so gradients only need to be summed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from meshwright_worker.distributed.collectives import all_reduce_on, flatten_tensors, unflatten_into
from meshwright_worker.parallel.shards import ParameterShard


def all_reduce_partial(
    shards: Sequence[ParameterShard], gradients: Sequence[torch.Tensor], group: dist.ProcessGroup, device: torch.device
) -> None:
    """All-reduce, in place and at once, the gradients that each rank of a tensor group computed for its positions only.

    `device` is the group's device; gradients may be on another one.
    """
    partial = [gradient for gradient, shard in zip(gradients, shards, strict=True) if shard.partial]
    if not partial:
        return
    flat = flatten_tensors(partial)
    all_reduce_on(device, flat, group)
    unflatten_into(flat, partial)


def local_square_sum(shards: Sequence[ParameterShard], gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return this rank's part of the squared global gradient norm, fp64 [].

    Summed over all ranks, it counts each element of each parameter once.
    """
    counted = [gradient for gradient, shard in zip(gradients, shards, strict=True) if shard.counted]
    if not counted:
        return torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    wide = torch.promote_types(counted[0].dtype, torch.float32)
    norms = torch._foreach_norm(counted, 2, dtype=wide)
    return torch.stack(list(norms)).double().square().sum()


def clipped_factor(factor: float, norm: float, limit: float) -> float:
    """Return the factor that scales gradients by `factor` and clips them, so that their global norm is at most `limit`.

    `norm` is their global norm after scaling by `factor`. A limit of 0 disables clipping.
    """
    return factor * (limit / norm) if limit and norm > limit else factor


def scale_and_clip(gradients: Sequence[torch.Tensor], factor: float, norm: float, limit: float) -> None:
    """Scale gradients in place by `clipped_factor`."""
    factor = clipped_factor(factor, norm, limit)
    if factor != 1.0:
        torch._foreach_mul_(list(gradients), factor)
