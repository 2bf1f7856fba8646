"""Running statistics of batch norms (arXiv 1502.03167), which replicas update with different micro-batches.

After a step every replica gets the statistics of a single process that runs the micro-batches of the first replica,
then those of the second, and so on. An exponential average is linear in its inputs. Each replica's contribution
therefore follows from its own average, the average before the step, and the number of micro-batches of the later
replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from meshwright_worker.distributed.collectives import flatten_tensors, unflatten_into

_AVERAGES = ("running_mean", "running_var")


@dataclass
class _StatisticsBefore:
    averages: list[torch.Tensor]
    tracked: int


class BatchNormStatistics:
    """The statistics of all batch norms of a module.

    Args:
        module: the user's module. Its synchronized batch norms are left out.
        group: the replicas, as ranks in the order of their micro-batches.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._group = group
        # A synchronized batch norm has seen all replicas' batches.
        self._norms = [
            part
            for part in module.modules()
            if isinstance(part, _BatchNorm) and not isinstance(part, nn.SyncBatchNorm) and part.running_mean is not None
        ]
        self._at_step_start: list[_StatisticsBefore] = []

    def begin(self) -> None:
        """Start a step."""
        self._at_step_start = [
            _StatisticsBefore([average.clone() for average in _averages(norm)], _tracked(norm)) for norm in self._norms
        ]

    def finish(self) -> None:
        """Finish a step's forward passes. Collective over replicas."""
        if not self._norms or self._group.size() == 1:
            return
        ranks, rank = self._group.size(), self._group.rank()
        micro_batch_counts = self._micro_batches_seen(ranks, rank)
        shares = []
        for norm, before, counts in zip(self._norms, self._at_step_start, micro_batch_counts.T.tolist(), strict=True):
            own_weight, previous_weight = _weights(norm.momentum, before.tracked, counts, rank)
            for now, then in zip(_averages(norm), before.averages, strict=True):
                shares.append(own_weight * now - previous_weight * then)
        flat = flatten_tensors(shares)
        dist.all_reduce(flat, group=self._group)
        unflatten_into(flat, [average for norm in self._norms for average in _averages(norm)])
        for norm, before, counts in zip(self._norms, self._at_step_start, micro_batch_counts.T.tolist(), strict=True):
            norm.num_batches_tracked.fill_(before.tracked + sum(counts))  # type: ignore[union-attr]

    def undo(self) -> None:
        """Go back to the statistics at the start of the step, which were those of inputs that diverge."""
        for norm, before in zip(self._norms, self._at_step_start, strict=True):
            for now, then in zip(_averages(norm), before.averages, strict=True):
                now.copy_(then)
            norm.num_batches_tracked.fill_(before.tracked)  # type: ignore[union-attr]

    def _micro_batches_seen(self, ranks: int, rank: int) -> torch.Tensor:
        """Return the number of micro-batches by replica and norm, int64 [replicas, norms]."""
        micro_batch_counts = torch.zeros(ranks, len(self._norms), dtype=torch.int64)
        for index, (norm, before) in enumerate(zip(self._norms, self._at_step_start, strict=True)):
            micro_batch_counts[rank, index] = _tracked(norm) - before.tracked
        on_device = micro_batch_counts.to(self._norms[0].running_mean.device)  # type: ignore[union-attr]
        dist.all_reduce(on_device, group=self._group)
        return on_device.cpu()


def _weights(momentum: float | None, tracked: int, counts: list[int], rank: int) -> tuple[float, float]:
    """The weights of a replica's averages in its contribution to the sum over replicas.

    Returns the weight of the averages after the step, and that of the averages before it, which is subtracted. The sum
    contains the averages before the step once: the first replica therefore subtracts less.
    """
    if momentum is None:
        # The mean over all micro-batches so far.
        total = max(1, tracked + sum(counts))
        own_weight, before, remaining = (tracked + counts[rank]) / total, tracked / total, tracked / total
    else:
        retention = 1 - momentum
        own_weight, remaining = retention ** sum(counts[rank + 1 :]), retention ** sum(counts)
        before = own_weight * retention ** counts[rank]
    return own_weight, before - remaining if rank == 0 else before


def _averages(norm: _BatchNorm) -> list[torch.Tensor]:
    return [getattr(norm, name) for name in _AVERAGES]


def _tracked(norm: _BatchNorm) -> int:
    return int(norm.num_batches_tracked)  # type: ignore[arg-type]
