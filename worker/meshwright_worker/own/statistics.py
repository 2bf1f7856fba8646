"""Running statistics of batch norms (arXiv 1502.03167), which replicas learn from different micro-batches.

After a step every replica gets the statistics of one process that runs the micro-batches of the first replica, then
those of the second, and so on. An exponential average is linear in what is averaged, so each replica's share of the
whole follows from its own average, the one before the step and how many micro-batches the later replicas had.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

_AVERAGES = ("running_mean", "running_var")


@dataclass
class _Before:
    averages: list[torch.Tensor]
    tracked: int


class RunningStatistics:
    """The statistics of all batch norms of a module.

    Args:
        module: whose.
        group: the replicas, ranks in the order of their micro-batches.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._group = group
        # A synchronised one has seen all replicas' batches.
        self._norms = [
            part
            for part in module.modules()
            if isinstance(part, _BatchNorm) and not isinstance(part, nn.SyncBatchNorm) and part.running_mean is not None
        ]
        self._before: list[_Before] = []

    def begin(self) -> None:
        """A step begins."""
        self._before = [
            _Before([average.clone() for average in _averages(norm)], _tracked(norm)) for norm in self._norms
        ]

    def finish(self) -> None:
        """A step's forward passes are over. Collective over replicas."""
        if not self._norms or self._group.size() == 1:
            return
        ranks, rank = self._group.size(), self._group.rank()
        seen = self._seen(ranks, rank)
        shares = []
        for norm, before, counts in zip(self._norms, self._before, seen.T.tolist(), strict=True):
            mine, taken = _weights(norm.momentum, before.tracked, counts, rank)
            for now, then in zip(_averages(norm), before.averages, strict=True):
                shares.append((mine * now - taken * then).flatten())
        flat = torch.cat(shares)
        dist.all_reduce(flat, group=self._group)
        averages = [average for norm in self._norms for average in _averages(norm)]
        for average, whole in zip(averages, torch.split(flat, [average.numel() for average in averages]), strict=True):
            average.copy_(whole.view_as(average))
        for norm, before, counts in zip(self._norms, self._before, seen.T.tolist(), strict=True):
            norm.num_batches_tracked.fill_(before.tracked + sum(counts))  # type: ignore[union-attr]

    def _seen(self, ranks: int, rank: int) -> torch.Tensor:
        """Micro-batches by replica and norm, int64 [replicas, norms]."""
        seen = torch.zeros(ranks, len(self._norms), dtype=torch.int64)
        for index, (norm, before) in enumerate(zip(self._norms, self._before, strict=True)):
            seen[rank, index] = _tracked(norm) - before.tracked
        on_device = seen.to(self._norms[0].running_mean.device)  # type: ignore[union-attr]
        dist.all_reduce(on_device, group=self._group)
        return on_device.cpu()


def _weights(momentum: float | None, tracked: int, counts: list[int], rank: int) -> tuple[float, float]:
    """What a replica's averages after the step count in the whole, and what is taken off of those before it.

    What the first replica takes off is less what is left of them in the whole.
    """
    if momentum is None:
        # The mean over all micro-batches so far.
        total = max(1, tracked + sum(counts))
        mine, before, left = (tracked + counts[rank]) / total, tracked / total, tracked / total
    else:
        kept = 1 - momentum
        mine, left = kept ** sum(counts[rank + 1 :]), kept ** sum(counts)
        before = mine * kept ** counts[rank]
    return mine, before - left if rank == 0 else before


def _averages(norm: _BatchNorm) -> list[torch.Tensor]:
    return [getattr(norm, name) for name in _AVERAGES]


def _tracked(norm: _BatchNorm) -> int:
    return int(norm.num_batches_tracked)  # type: ignore[arg-type]
