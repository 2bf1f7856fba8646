"""Collectives on plain tensors: gathers, sums, transfers around a ring, and many tensors in one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from meshwright_worker.distributed.step_clock import wait_for

_POSITIONS = 1

# torch 2.13 renamed these two and deprecates the names of earlier versions.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def all_gather(
    output: torch.Tensor, own: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """Gather each rank's `own` into `output`. The function is looked up at each call, because it may be timed."""
    work: dist.Work | None = getattr(dist, _ALL_GATHER)(output, own, group=group, async_op=async_op)
    return work


def reduce_scatter(
    output: torch.Tensor, parts: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """Sum each rank's part of this rank into `output`, in the same way."""
    work: dist.Work | None = getattr(dist, _REDUCE_SCATTER)(output, parts, group=group, async_op=async_op)
    return work


def all_gather_into(
    gathered: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> dist.Work | None:
    """Fill `gathered`, [ranks, ...], with each rank's `own`, [...] or [1, ...]. With `async_op`, return the pending
    work.
    """
    return all_gather(gathered.flatten(), own.flatten(), group=group, async_op=async_op)


def reduce_scatter_into(
    own: torch.Tensor, send_buffer: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> dist.Work | None:
    """Fill `own`, [...], with the sum over ranks of row `rank` of `send_buffer`, [ranks, ...], where `rank` is this
    rank.
    """
    return reduce_scatter(own.flatten(), send_buffer.flatten(), group=group, async_op=async_op)


def all_reduce_sum(x: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Sum over ranks in place; issues no collective for a group of one rank."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(x, group=group)


def all_reduce_on(device: torch.device, x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum over ranks in place, via `device`: NCCL cannot reduce tensors in host memory, where offloaded tensors are."""
    moved = x.to(device)
    dist.all_reduce(moved, group=group)
    if moved is not x:
        x.copy_(moved)


def all_gather_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather [batch, positions / n, ...] of each of the n ranks into [batch, positions, ...]."""
    parts = x.new_empty((group.size(), *x.shape))
    all_gather(parts.flatten(0, 1), x.contiguous(), group=group)
    return parts.transpose(0, _POSITIONS).flatten(_POSITIONS, _POSITIONS + 1)


def reduce_scatter_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum [batch, positions, ...] over ranks; each rank gets its [batch, positions / n, ...]."""
    parts = torch.stack(x.chunk(group.size(), dim=_POSITIONS))
    own = torch.empty_like(parts[0])
    reduce_scatter(own, parts.flatten(0, 1), group=group)
    return own


class RingTransfer:
    """Tensors sent to the next rank of a group, and tensors received from the previous rank.

    Args:
        sent: contiguous tensors.
        received: memory for as many tensors of the previous rank.
        group: whose ranks form the ring.
    """

    def __init__(
        self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], group: dist.ProcessGroup
    ) -> None:
        rank, ranks = group.rank(), group.size()
        after, before = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
        operations = []
        for own, other in zip(sent, received, strict=True):
            operations.append(dist.P2POp(dist.isend, own, after, group))
            operations.append(dist.P2POp(dist.irecv, other, before, group))
        # Referenced until they are sent: on gloo nothing else references them.
        self._sent = sent
        self._received = received
        self._works = dist.batch_isend_irecv(operations)
        self._group = group

    def wait(self) -> Sequence[torch.Tensor]:
        """Wait, and return the received tensors."""
        for work in self._works:
            wait_for(work, self._group)
        return self._received


def all_reduced(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum over ranks, on every rank."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def flatten_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the elements of all tensors, [elements], in new memory."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: torch.Tensor, templates: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that `flat` was created from, or others of their shapes, as views of it."""
    parts = torch.split(flat, [template.numel() for template in templates])
    return [part.view_as(template) for part, template in zip(parts, templates, strict=True)]


def unflatten_into(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy `flat` back into the tensors that it was created from."""
    for tensor, part in zip(tensors, unflatten(flat, tensors), strict=True):
        tensor.copy_(part)
